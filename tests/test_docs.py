"""The documentation is true: its code runs, its outputs are those shown, its tables are those of the code, and adding a format, an
operator or a pass takes the files that the how-to pages say.

`QSYNC_UPDATE_DOCS=1 pytest tests/test_docs.py` writes the outputs and tables that have changed. Read the difference before you commit it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pages
import pytest
import torch

import qsync_fx
from qsync_fx.backend.cuda.config import Arch
from qsync_fx.backend.cuda.device import assumed
from qsync_fx.backend.operators import lowerings
from qsync_fx.devices import Support, support
from qsync_fx.ops import Kind, table
from qsync_fx.options import DOCUMENTED, Options
from qsync_fx.passes.pipeline import pipeline
from qsync_fx.precision import FORMATS, Precision

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.stem: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
FILES_TO_TOUCH = {"howto-format": 1, "howto-operator": 2, "howto-pass": 3}
PINNED = re.findall(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)[0]
UPDATE = bool(os.environ.get("QSYNC_UPDATE_DOCS"))

# Pages that change the tree run in a copy of it. An editable install would import the tree itself, whatever PYTHONPATH says.
_NOT_THE_INSTALLED = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""


def update_or_compare(path: Path, expected: str) -> None:
    if UPDATE:
        path.write_text(expected)
    assert path.read_text() == expected, (
        f"{path.name} is out of date; QSYNC_UPDATE_DOCS=1 pytest tests/test_docs.py writes it"
    )


def run(path: Path, folder: Path, scratch: Path, pythonpath: tuple[Path, ...] = ()) -> None:
    """Runs a page in a process of its own and checks that it shows what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, pythonpath))
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    outputs = scratch / "outputs.json"
    command = [sys.executable, str(Path(pages.__file__)), str(path), str(outputs)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{path.name} does not run:\n{done.stdout}\n{done.stderr}"
    if torch.__version__.partition("+")[0] == PINNED:
        # Another torch may write the same graph in other words.
        update_or_compare(path, pages.with_outputs(path.read_text(), json.loads(outputs.read_text())))


@pytest.mark.parametrize("name", [name for name in PAGES if name not in FILES_TO_TOUCH])
def test_page_runs(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    run(PAGES[name], folder, tmp_path)


@pytest.mark.parametrize("name", FILES_TO_TOUCH)
def test_howto_runs_and_touches_no_more_files(name: str, tmp_path: Path) -> None:
    tree, boot, site = tmp_path / "tree", tmp_path / "boot", tmp_path / "site"
    copy_tree(tree)
    boot.mkdir()
    site.mkdir()
    (boot / "sitecustomize.py").write_text(_NOT_THE_INSTALLED)
    native = importlib.util.find_spec("qsync_fx._C")
    assert native is not None and native.origin is not None
    shutil.copy(native.origin, tree / "qsync_fx")
    before = contents(tree)
    page = PAGES[name].read_text()
    pages.apply(page, tree)
    pages.install(page, site)
    run(PAGES[name], tree, tmp_path, (boot, site, tree))
    after = contents(tree)
    touched = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert len(touched) == FILES_TO_TOUCH[name], (
        f"the page says {FILES_TO_TOUCH[name]} files and touches {sorted(touched)}"
    )


def copy_tree(to: Path) -> None:
    """Copies what a build and a test run need; qsync_fx/passes and qsync_fx/backend stay links to the folders beside it."""
    to.mkdir()
    for name in ("qsync_fx", "passes", "backend", "tests"):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", to)


def contents(tree: Path) -> dict[str, bytes]:
    """Returns every file of a tree that a commit would hold, by its path."""
    made_by_tools = {"__pycache__", ".pytest_cache", ".hypothesis"}
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file() and not made_by_tools & set(path.relative_to(tree).parts) and path.suffix != ".so"
    }


def test_every_block_of_python_is_used() -> None:
    for path in PAGES.values():
        for block in pages.blocks(path.read_text()):
            used = block.runs or {"file", "package"} & block.values.keys()
            assert used or block.language != "python", f"{path.name} shows code that nothing runs:\n{block.text}"


def test_links_lead_somewhere() -> None:
    for path in PAGES.values():
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if file.startswith(("http:", "https:")):
                continue
            linked = path.parent / file if file else path
            assert linked.exists(), f"{path.name} links to {target}, which does not exist"
            anchors = (
                {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings(linked)}
                if anchor
                else {""}
            )
            assert anchor in anchors, f"{path.name} links to {target}, and {linked.name} has no such heading"


def headings(path: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        target for path in PAGES.values() for target in re.findall(r"(?:^|`)make (\w+)", path.read_text(), re.MULTILINE)
    }
    assert {"demo", "test"} <= named <= targets


# Tables.


@pytest.mark.parametrize(
    "path", [path for path in PAGES.values() if pages.generated(path.read_text())], ids=lambda path: path.stem
)
def test_tables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str) -> str:
        rows = {"options": options, "formats": formats, "devices": lambda: devices(monkeypatch)}[name]()
        if UPDATE or name == "options":
            return rows
        # A new format is one row in one file: a page may leave it out, but what a page says of a format is right.
        shown = set(path.read_text().splitlines())
        return "\n".join(line for line in rows.splitlines() if line in shown)

    update_or_compare(path, pages.with_generated(path.read_text(), make))


def markdown(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, re.sub(r"[^|]+", "---", head), *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines)


def options() -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}

    def default(name: str) -> str:
        value = defaults[name]
        return "none" if value is None else f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"

    rows = ((f"[`{name}`](docs/options.md#{name})", default(name), text) for name, text in DOCUMENTED.items())
    return markdown("| option | default | what it is |", rows)


def formats() -> str:
    def row(fmt: Precision) -> tuple[str, ...]:
        largest = f"{fmt.max:.8g}"
        kind = "integer" if fmt.kind == "integer" else f"float, {fmt.mantissa} bits of mantissa"
        kept = str(fmt.dtype).removeprefix("torch.") + (" and a scale" if fmt.scaled else "")
        return f"`{fmt.name}`", str(fmt.bits), kind, largest, kept, fmt.output, fmt.gradient, fmt.elsewhere

    head = "| format | bits | kind | largest | kept as | output | gradient rounded to | where it cannot run |"
    return markdown(head, map(row, FORMATS.values()))


def devices(monkeypatch: pytest.MonkeyPatch) -> str:
    def on_cpu(fmt: Precision, bf16: bool) -> Support:
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16, raising=False)
            return support.__wrapped__(torch.device("cpu"), fmt)

    def on_cuda(fmt: Precision) -> str:
        for capability in [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]:
            with monkeypatch.context() as patch:
                patch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
                if support.__wrapped__(torch.device("cuda", 0), fmt).how == "native":
                    return (
                        "everywhere"
                        if capability == (7, 0) and fmt.bits >= 32
                        else f"from {capability[0]}.{capability[1]}"
                    )
        for arch in get_args(Arch):
            with assumed(arch):
                if support.__wrapped__(torch.device("cuda", 0), fmt).how == "native":
                    number = arch.strip("sm_a")
                    return f"from {number[:-1]}.{number[-1]} to 9.0, by [our kernels](docs/kernels.md)"
        return "none"

    def row(fmt: Precision) -> tuple[str, ...]:
        found = list(dict.fromkeys(on_cpu(fmt, bf16) for bf16 in (True, False)))
        return f"`{fmt.name}`", "; or ".join(f"{s.how}: {s.reason}" for s in found), on_cuda(fmt)

    return markdown("| format | on the CPU | native on CUDA (compute capability) |", map(row, FORMATS.values()))


def test_every_option_has_a_section_with_an_example() -> None:
    text = PAGES["options"].read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert [name for name in sections if name in DOCUMENTED] == list(DOCUMENTED)
    for name in DOCUMENTED:
        examples = [block.text for block in pages.blocks(sections[name]) if block.runs]
        assert any(f'"{name}"' in example for example in examples), f"the option {name} has no example"


# The shape of the tree that the pages rely on.

SOURCES = {
    str(path.relative_to(ROOT)): path
    for folder in ("qsync_fx", "passes", "backend")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if folder != "qsync_fx" or path.relative_to(ROOT).parts[1] not in ("passes", "backend")
}


def strings(path: Path) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def attributes(path: Path) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def test_no_file_but_the_table_names_formats_one_by_one() -> None:
    """FP32 and FP64 are what models are written in, so much speaks of them. A narrower format is named where nothing else can be."""
    narrow = {fmt.name for fmt in FORMATS.values() if fmt.bits < 32}
    # Which units multiply which formats, and by what instruction, is what the files in backend/cuda are about.
    sources = {name: path for name, path in SOURCES.items() if not name.startswith("backend/cuda/")}
    named = {name: found for name, path in sources.items() if (found := strings(path) & narrow)}
    because = {
        "qsync_fx/precision.py": "the table",
        "qsync_fx/devices.py": "which devices have which units, and what runs when the user asks for nothing",
        "qsync_fx/doctor.py": "an instruction set of processors is called bf16",
        "qsync_fx/values.py": "the short name of a torch type in texts of graphs is bf16",
    }
    assert named.keys() == because.keys(), {name: named.get(name) for name in named.keys() ^ because.keys()}
    assert named["qsync_fx/doctor.py"] == named["qsync_fx/values.py"] == {"bf16"}


def test_no_file_but_the_table_names_types_one_by_one() -> None:
    narrow = {str(fmt.dtype) for fmt in FORMATS.values() if fmt.dtype.itemsize < 4}
    named = {
        name for name, path in SOURCES.items() if attributes(path) & narrow and not name.startswith("backend/cuda/")
    }
    because = {
        "qsync_fx/precision.py": "the table",
        "qsync_fx/values.py": "short names of torch types in texts of graphs; one that has none shows its long name",
        "backend/operators/native.py": "what the kernels of the native module take",
        "backend/operators/integers.py": "what torch's integer product takes",
        "backend/relu.py": "a byte that says yes or no, and is no number",
    }
    assert named == because.keys()


def test_no_pass_names_an_operator() -> None:
    """What a pass knows of an operator stands in its row; passes call the conversions that they insert and nothing else."""
    names = {row.name for row in table().values() if row.kind is Kind.ADJUSTABLE} | set(lowerings())
    called = {
        f"torch.ops.aten.{name}" for row in table().values() for name in (row.name, f"{row.name}_") if row.name in names
    }
    for name, path in SOURCES.items():
        if name.startswith("passes/"):
            assert not strings(path) & names, name
            assert not any("aten::" in text for text in strings(path)), name
            assert not attributes(path) & called, name


def test_what_takes_scaled_formats_has_a_row_and_a_lowering() -> None:
    assert {row.name for row in table().values() if row.scaled} == set(lowerings())


def test_one_file_a_pass() -> None:
    for step in pipeline(Options(), lowerings()):
        assert type(step).__module__ == f"qsync_fx.passes.{step.name}"


LAYERS = (
    "errors files opid precision ops devices resolve plan plan_file plan_check options autocast_policy nodes values notes graph",
    "passes",
    "backend",
    "explanation report",
    "doctor model_reference kernels_cli tune_cli cli",
)
"""From the bottom to the top: a module imports from its own layer and from those before it."""


def layer(module: str) -> int:
    parts = module.split(".")[1:]
    prefixes = {".".join(parts[: n + 1]) for n in range(len(parts))}
    found = [at for at, names in enumerate(LAYERS) if prefixes & set(names.split())]
    assert found, f"{module} is in no layer: say in LAYERS and in docs/architecture.md where it belongs"
    return found[0]


def test_imports_run_one_way() -> None:
    for name, path in SOURCES.items():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = module if module.startswith("qsync_fx") else f"qsync_fx.{module}"
        if module in ("qsync_fx", "qsync_fx.backend", "qsync_fx.passes"):
            continue
        for imported in imports(ast.parse(path.read_text())):
            assert layer(imported) <= layer(module), f"{name} imports {imported}, which stands above it"


def imports(tree: ast.Module) -> Iterator[str]:
    """Yields the modules of ours that a module imports, also inside of functions, but not for type checkers alone."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "qsync_fx":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not alias.name.startswith("_"))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("qsync_fx."))
        todo += ast.iter_child_nodes(node)


def test_the_page_on_architecture_tells_the_layers() -> None:
    text = PAGES["architecture"].read_text()
    told = [re.findall(r"`([\w.]+)`", line) for line in re.findall(r"^\d+\. (.+)$", text, flags=re.MULTILINE)]
    assert [" ".join(names) for names in told] == list(LAYERS)


def test_no_module_hides_a_name_of_the_package() -> None:
    """`import qsync_fx.plan` puts a module in place of any `qsync_fx.plan` there is."""
    modules = {module.name for module in pkgutil.iter_modules(qsync_fx.__path__)}
    assert not modules & set(qsync_fx.__all__)
