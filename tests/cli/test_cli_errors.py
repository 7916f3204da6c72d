"""Command line errors: invalid arguments, model references and files, and user exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from qsync_fx.cli.model_args import load
from qsync_fx.errors import OptionError
from qsync_fx.plan import Plan
from tests.support.processes.command_line import run

pytestmark = pytest.mark.usefixtures("folder")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines: list[str] = captured.err.splitlines()
    return lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["inspct"], "invalid choice: 'inspct'"),
        (["inspect"], "the following arguments are required: MODULE:CALLABLE"),
        (
            ["inspect", "models_of_test:small", "--train", "--eval"],
            "not allowed with argument --train",
        ),
        (
            ["inspect", "models_of_test:small", "--json", "--after", "lower"],
            "not allowed with argument --json",
        ),
        (["inspect", "models_of_test:small", "--diff", "lower"], "expected 2 arguments"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = fails(capsys, *arguments)
    assert lines[0].startswith("usage: qsync")
    assert message in lines[-1]


@pytest.mark.parametrize(
    ("reference", "message", "do"),
    [
        ("models_of_test", "'models_of_test' does not name a model", "write MODULE:CALLABLE"),
        ("models_of_test:", "does not name a model", "write MODULE:CALLABLE"),
        (":small", "does not name a model", "write MODULE:CALLABLE"),
        (".models_of_test:small", "does not name a model", "write MODULE:CALLABLE"),
        ("models_of_test:small.", "does not name a model", "write MODULE:CALLABLE"),
        (
            "./examples/bert.py:small",
            "'./examples/bert.py' is a path, not a module",
            'write "examples.bert:small"',
        ),
        (
            "models_of_tests:small",
            "there is no module 'models_of_tests'",
            "run qsync in the folder of the module",
        ),
        (
            "models_of_test.deeper:small",
            "there is no module 'models_of_test.deeper'",
            "run qsync in the folder",
        ),
        ("models_of_test:smal", "models_of_test has no 'smal'", "did you mean 'small'? known: "),
        ("models_of_test:Factory.mak", "Factory has no 'mak'", "did you mean 'make'? known: make"),
        ("models_of_test:number", "a value of type int", "name a function"),
        (
            "models_of_test:needs",
            "cannot be called without arguments: missing a required",
            "give all its parameters defaults",
        ),
        (
            "models_of_test:alone",
            "the function returned a value of type Small",
            "return (model, args)",
        ),
        ("models_of_test:four", "the function returned a tuple of 4", "return (model, args)"),
        (
            "models_of_test:tensor",
            "args is of type Tensor, not a tuple",
            "return (model, (x,)) for one input",
        ),
        (
            "models_of_test:text",
            "args is of type str, not a tuple",
            "return (model, (x,)) for one input",
        ),
        (
            "models_of_test:swapped",
            "the model is of type tuple",
            "return a torch.nn.Module or a function",
        ),
        (
            "models_of_test:keywords",
            "kwargs is not a dictionary with string keys",
            "return (model, args)",
        ),
    ],
)
def test_references_that_lead_nowhere(
    reference: str, message: str, do: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError) as caught:
        load(reference)
    assert message in caught.value.what
    assert caught.value.do is not None
    assert caught.value.do.startswith(do)
    lines = fails(capsys, "inspect", reference)
    assert lines == f"qsync: {caught.value}".splitlines()


def test_references_that_lead_somewhere() -> None:
    model, args, kwargs = load("models_of_test:evaluated")
    assert type(model).__name__ == "Small"
    assert isinstance(args, tuple)
    assert kwargs == {"scale": 2.0}
    assert load("models_of_test:small")[2] == {}


def test_exception_of_user_code_is_not_caught() -> None:
    with pytest.raises(RuntimeError, match="from the user's function"):
        run("inspect", "models_of_test:broken")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        run("inspect", "imports_missing:small")


@pytest.mark.parametrize(
    ("arguments", "message", "do"),
    [
        (
            ["--precision", "int9"],
            "the option \"precision\" cannot be 'int9'",
            "did you mean 'int8'?",
        ),
        (
            ["--rounding", "up"],
            "the option \"rounding\" cannot be 'up'",
            "known: floor, nearest, stochastic",
        ),
        (
            ["--plan", "none.json"],
            "the plan cannot be read: No such file or directory",
            "check the path",
        ),
        (["--plan", "cut.json"], "the plan is truncated", "get a complete copy"),
        (
            ["--plan", "cut.json", "--precision", "int8"],
            "the plan is truncated",
            "get a complete copy",
        ),
        (
            ["--plan", "whole.json", "--precision", "int8"],
            '"precision" and "plan" are both set',
            'remove "precision"',
        ),
        (
            ["--plan", "whole.json"],
            "the pattern 'heads' selects none of the 2 adjustable operators",
            "nearest: head",
        ),
        (["--pass", "none"], "no installed packages offer a pass 'none'", "install one"),
        (["--after", "lowr"], "no pass 'lowr' has run", "did you mean 'lower'?"),
        (["--diff", "assign", "zzzzz"], "no pass 'zzzzz' has run", "known: "),
    ],
)
def test_errors_have_three_lines(
    arguments: list[str], message: str, do: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cut.json").write_text('{"format": "qsync-plan", "ver')
    Plan("int8", [("heads", "fp32")]).save("whole.json")
    lines = fails(capsys, "inspect", "models_of_test:small", *arguments)
    assert len(lines) in (2, 3), "an error has the lines what, where (if known) and do"
    assert lines[0].startswith(f"qsync: {message}")
    assert lines[-1].startswith(f"  do:    {do}")


def test_a_model_without_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        fails(capsys, "inspect", "models_of_test:nothing")[0]
        == "qsync: torch.compile captured no graph of the model"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["measure", "json:loads", "--output"],
        ["sensitivity", "json:loads", "--output"],
        ["plan", "json:loads", "-o"],
        ["replay", "missing.json", "--perfetto"],
        ["inspect", "json:loads", "--plan-out"],
        ["inspect", "json:loads", "--dot"],
        ["tune", "json:loads", "--record"],
    ],
)
def test_unwritable_output_is_reported_before_any_work(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "front.svg"
    error = "\n".join(fails(capsys, *arguments, str(path)))
    assert "cannot be written: No such file or directory" in error and str(path) in error
