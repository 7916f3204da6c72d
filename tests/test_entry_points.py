"""Packages with passes, operators and commands: valid ones work, broken ones are named."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import ops
from qsync_fx.backend.operators import lowerings
from qsync_fx.cli import main
from qsync_fx.entry_points import listed_in_modules
from qsync_fx.errors import OptionError, QSyncError
from qsync_fx.passes import pass_manager
from tests.support import pages

PASS = """
import qsync_fx

@qsync_fx.graph_pass
def quiet(graph):
    for op in graph.operators(kind="adjustable"):
        op.assign("fp32", reason="quiet")

class Loud:
    name = "loud"
    def __call__(self, graph): ...

def plain(graph): ...
number = 3
rows = (3,)
text = "aten::linear"
taken = (qsync_fx.ops.OperatorRow("linear", ("aten::linear",), qsync_fx.ops.Kind.FIXED, "mine"),)
"""

LOWERING = """
from qsync_fx.backend.operators import Lowering
def emit(node, given): ...
def keep(node, role): ...
number = 3
rows = (3,)
class Quiet: ...
taken = (Lowering("linear", emit, keep),)
rowless = (Lowering("softmax", emit, keep), Lowering("no_such", emit, keep))
"""

COMMAND = """
from qsync_fx.cli import Command, output

def count(arguments):
    output.show(output.table(("word", "letters"), [(word, str(len(word))) for word in arguments.words]))

def words(parser):
    parser.add_argument("words", nargs="+")

counting = Command("count letters", count, words)
number = 3
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def put(
        group: str,
        value: str,
        name: str = "quiet",
        package: str = "quiet-package",
        code: str = PASS,
    ) -> None:
        module = package.replace("-", "_")
        project = (
            f'[project]\nname = "{package}"\nversion = "1.0"\n[project.entry-points."{group}"]\n'
            f'{name} = "{module}:{value}"\n'
        )
        page = (
            f"```toml package=pyproject.toml\n{project}```\n\n```python package={module}.py\n"
            f"{code.strip()}\n```\n"
        )
        pages.install(page, tmp_path)
        names.append(module)
        forget()

    def forget() -> None:
        for cache in (ops.table, ops._row_of, pass_manager._installed, lowerings):
            cache.cache_clear()
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)

    yield put
    monkeypatch.undo()
    forget()


def explained() -> qsync_fx.Explanation:
    options = {"precision": "bf16", "passes": ["quiet"]}
    return qsync_fx.explain(nn.Linear(4, 4), torch.randn(2, 4), options=options)


def test_a_pass_of_a_package_runs(install: Install) -> None:
    install("qsync_fx.passes", "quiet")
    assert [(str(op.precision), op.reason) for op in explained().operators] == [("fp32", "quiet")]


@pytest.mark.parametrize(
    ("value", "code", "cause"),
    [
        (
            "quiet",
            "import no_such_module",
            "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("quiet", "import qsync_fx\nqsync_fx.graph_pas", "cannot be loaded: AttributeError: "),
        ("quiet", "1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        (
            "silent",
            PASS,
            "cannot be loaded: AttributeError: module 'quiet_package' has no attribute 'silent'",
        ),
        (
            "plain",
            PASS,
            "offers a value of type function where a function decorated with @qsync_fx.graph_pass "
            "is expected",
        ),
        (
            "number",
            PASS,
            "offers a value of type int where a function decorated with @qsync_fx.graph_pass is "
            "expected",
        ),
        (
            "Loud",
            PASS,
            "offers the class Loud where a function decorated with @qsync_fx.graph_pass is "
            "expected",
        ),
    ],
)
def test_a_broken_pass_names_its_package(
    value: str, code: str, cause: str, install: Install
) -> None:
    install("qsync_fx.passes", value, code=code)
    with pytest.raises(QSyncError) as caught:
        explained()
    assert caught.value.what.startswith("the installed package quiet-package ")
    assert cause in caught.value.what
    assert (
        caught.value.where
        == f'entry point quiet = "quiet_package:{value}" in the group qsync_fx.passes'
    )
    assert caught.value.do is not None and "uninstall" in caught.value.do
    with pytest.raises(QSyncError, match="quiet-package"):
        torch.compile(nn.Linear(4, 4), backend="qsync", options={"passes": ["quiet"]})(
            torch.randn(2, 4)
        )


@pytest.mark.parametrize(
    ("value", "code", "cause"),
    [
        ("rows", "import no_such_module", "cannot be loaded: ModuleNotFoundError"),
        (
            "rows",
            PASS,
            "offers a value of type int where a tuple of qsync_fx.ops.OperatorRow is expected",
        ),
        (
            "number",
            PASS,
            "offers a value of type int where a tuple of qsync_fx.ops.OperatorRow is expected",
        ),
        (
            "text",
            PASS,
            "offers a value of type str where a tuple of qsync_fx.ops.OperatorRow is expected",
        ),
    ],
)
def test_broken_rows_name_their_package(
    value: str, code: str, cause: str, install: Install
) -> None:
    """All installed packages add their rows, without a request by the user."""
    install("qsync_fx.ops", value, code=code)
    with pytest.raises(QSyncError) as caught:
        torch.compile(nn.Linear(4, 4), backend="qsync")(torch.randn(2, 4))
    assert caught.value.what.startswith("the installed package quiet-package ")
    assert cause in caught.value.what
    assert (
        caught.value.where
        == f'entry point quiet = "quiet_package:{value}" in the group qsync_fx.ops'
    )


def test_two_rows_for_one_operator(install: Install) -> None:
    install("qsync_fx.ops", "taken")
    with pytest.raises(QSyncError, match="two rows claim the operator aten::linear") as caught:
        ops.table()
    assert (
        caught.value.where
        == "qsync_fx.ops.matmul and quiet_package:taken of the package quiet-package"
    )


@pytest.mark.parametrize(
    ("value", "code", "cause"),
    [
        ("taken", "import no_such_module", "cannot be loaded: ModuleNotFoundError"),
        (
            "rows",
            LOWERING,
            "offers a value of type int where a tuple of qsync_fx.backend.operators.Lowering is "
            "expected",
        ),
        (
            "number",
            LOWERING,
            "offers a value of type int where a tuple of qsync_fx.backend.operators.Lowering",
        ),
        (
            "Quiet",
            LOWERING,
            "offers the class Quiet where a tuple of qsync_fx.backend.operators.Lowering is "
            "expected",
        ),
    ],
)
def test_broken_lowerings_name_their_package(
    value: str, code: str, cause: str, install: Install
) -> None:
    install("qsync_fx.lowerings", value, code=code)
    with pytest.raises(QSyncError) as caught:
        torch.compile(nn.Linear(4, 4), backend="qsync")(torch.randn(2, 4))
    assert caught.value.what.startswith("the installed package quiet-package ")
    assert cause in caught.value.what
    assert (
        caught.value.where
        == f'entry point quiet = "quiet_package:{value}" in the group qsync_fx.lowerings'
    )


def test_two_lowerings_for_one_operator(install: Install) -> None:
    install("qsync_fx.lowerings", "taken", code=LOWERING)
    with pytest.raises(
        QSyncError, match="two lowerings are registered for the operator linear"
    ) as caught:
        lowerings()
    assert (
        caught.value.where
        == "qsync_fx.backend.operators.linear and quiet_package:taken of the package "
        "quiet-package"
    )


def test_a_lowering_without_a_row(install: Install) -> None:
    install("qsync_fx.lowerings", "rowless", code=LOWERING)
    with pytest.raises(
        QSyncError, match="a lowering is registered for the operator softmax, but no row"
    ) as caught:
        lowerings()
    assert caught.value.where == "quiet_package:rowless of the package quiet-package"


def test_two_packages_with_a_pass_of_equal_name(install: Install) -> None:
    install("qsync_fx.passes", "quiet")
    install("qsync_fx.passes", "quiet", package="other-package")
    with pytest.raises(OptionError, match="2 installed packages offer a pass 'quiet'") as caught:
        explained()
    assert set((caught.value.where or "").split(", ")) == {"quiet-package", "other-package"}


def test_a_pass_that_no_package_offers(install: Install) -> None:
    install("qsync_fx.passes", "quiet", name="quite")
    with pytest.raises(OptionError) as caught:
        explained()
    assert caught.value.do == "did you mean 'quite'? known: quite"


def test_command_reports_the_error_in_three_lines(
    install: Install,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install("qsync_fx.passes", "quiet", code="import no_such_module")
    (tmp_path / "model_of_test.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "model_of_test:make", "--pass", "quiet"]) == 2
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == [
        "qsync:",
        "where:",
        "do:",
    ]


def test_a_command_of_a_package_runs(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("qsync_fx.commands", "counting", name="count", code=COMMAND)
    assert main(["count", "one", "three"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["word", "letters"],
        ["one", "3"],
        ["three", "5"],
    ]
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "count letters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "code", "cause"),
    [
        ("counting", "import no_such_module", "cannot be loaded: ModuleNotFoundError"),
        (
            "counting",
            "from qsync_fx.cli import Command\ncounting = Command('x')",
            "a command needs either a function or actions",
        ),
        ("missing", COMMAND, "has no attribute 'missing'"),
        ("number", COMMAND, "offers a value of type int where a qsync_fx.cli.Command is expected"),
        (
            "count",
            COMMAND,
            "offers a value of type function where a qsync_fx.cli.Command is expected",
        ),
    ],
)
def test_broken_command_names_its_package_and_does_not_affect_others(
    value: str, code: str, cause: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("qsync_fx.commands", value, name="count", code=code)
    assert main(["count"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("qsync: the installed package quiet-package ")
    assert cause in message
    assert (
        f'where: entry point count = "quiet_package:{value}" in the group qsync_fx.commands'
        in message
    )
    assert "do:    upgrade or uninstall quiet-package" in message
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "cannot be used: the installed package quiet-package" in capsys.readouterr().out
    assert main(["kernels", "path"]) == 0


@pytest.mark.parametrize(
    ("name", "where"),
    [("count", "the package other-package"), ("doctor", "qsync_fx.cli.commands.doctor")],
)
def test_two_commands_of_equal_name(
    name: str, where: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("qsync_fx.commands", "counting", name=name, code=COMMAND)
    if name == "count":
        install("qsync_fx.commands", "counting", name=name, package="other-package", code=COMMAND)
    assert main([name, "one"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"qsync: several commands have the name '{name}'"
    assert where in lines[1] and "the package quiet-package" in lines[1]
    assert main(["kernels", "path"]) == 0


def test_modules_of_a_package_list_their_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "extended_package"
    folder.mkdir()
    value = "import types\nVALUES = (types.SimpleNamespace(name={!r}),)\n"
    for name, text in (("__init__", ""), ("first", value.format("a")), ("helpers", "")):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert list(listed_in_modules("extended_package", "VALUES")) == ["a"]
    (folder / "second.py").write_text(value.format("b"))
    importlib.invalidate_caches()
    assert list(listed_in_modules("extended_package", "VALUES")) == ["a", "b"]
    (folder / "fourth.py").write_text(value.format("a"))
    importlib.invalidate_caches()
    with pytest.raises(QSyncError, match="two VALUES are called 'a'") as caught:
        listed_in_modules("extended_package", "VALUES")
    assert caught.value.where == "extended_package.first and extended_package.fourth"
