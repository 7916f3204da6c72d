"""The tree has the shape that the pages rely on: formats stand in one table, operators in theirs, imports run one way.

So that adding a format, an operator or a pass takes no more files than the how-to pages say.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import qsync_fx
from qsync_fx.backend.operators import lowerings
from qsync_fx.formats import FORMATS
from qsync_fx.ops import Kind, table
from qsync_fx.options import Options
from qsync_fx.passes.pass_manager import pipeline

ROOT = Path(__file__).resolve().parent.parent
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


def imported_names(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in nodes if node.module == "os" for alias in node.names}


def test_no_file_but_the_table_names_formats_one_by_one() -> None:
    """FP32 and FP64 are what models are written in, so much speaks of them. A narrower format is named where nothing else can be."""
    narrow = {fmt.name for fmt in FORMATS.values() if fmt.bits < 32}
    # Which units multiply which formats, and by what instruction, is what the files in backend/cuda are about.
    sources = {name: path for name, path in SOURCES.items() if not name.startswith("backend/cuda/")}
    named = {name: found for name, path in sources.items() if (found := strings(path) & narrow)}
    because = {
        "qsync_fx/formats.py": "the table",
        "qsync_fx/devices/format_support.py": "which devices have which units, and what runs when the user asks for nothing",
        "qsync_fx/devices/cpu_features.py": "instruction sets of CPUs, one of which is called bf16",
        "qsync_fx/graph/fx_utils.py": "the short name of a torch type in texts of graphs is bf16",
    }
    assert named.keys() == because.keys(), {name: named.get(name) for name in named.keys() ^ because.keys()}
    assert named["qsync_fx/graph/fx_utils.py"] == {"bf16"}


def test_no_file_but_the_table_names_types_one_by_one() -> None:
    narrow = {str(fmt.dtype) for fmt in FORMATS.values() if fmt.dtype.itemsize < 4}
    named = {
        name for name, path in SOURCES.items() if attributes(path) & narrow and not name.startswith("backend/cuda/")
    }
    because = {
        "qsync_fx/formats.py": "the table",
        "qsync_fx/graph/fx_utils.py": "short names of torch types in texts of graphs; one that has none shows its long name",
        "backend/numerics/native.py": "what the kernels of the native module take",
        "backend/operators/gemm/int_mm.py": "what torch's integer product takes",
        "backend/operators/gemm/cpu_kernels.py": "what the native module multiplies, and gives out",
        "backend/inductor/layouts.py": "the one type of which oneDNN's gradients of some convolutions were measured to be slow",
        "backend/operators/masks.py": "a byte that says yes or no, and is no number",
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
    assert {row.name for row in table().values() if row.may_scale} == set(lowerings())


def test_one_file_a_pass() -> None:
    for step in pipeline(Options(), lowerings()):
        assert type(step).__module__ == f"qsync_fx.passes.{step.name}"


def test_one_file_reads_environment_variables() -> None:
    names = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
    readers = {name for name, path in SOURCES.items() if attributes(path) & names or "environ" in imported_names(path)}
    assert readers == {"qsync_fx/environment.py"}


LAYERS = (
    "errors environment serialization entry_points formatting text_tables option_help plan rounding "
    "formats ops devices options autocast_policy module_paths graph plan_cache coverage",
    "predictor",
    "passes",
    "backend",
    "allocator communication diagnostics optim profiler plan_switching timeline",
    "distributed",
    "cli",
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


def imports(tree: ast.Module, functions: bool = True) -> Iterator[str]:
    """Yields the modules of ours that a module imports, also inside of functions, but not for type checkers alone."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef) and not functions:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "qsync_fx":
            yield from (f"{node.module}.{alias.name}" for alias in node.names if not alias.name.startswith("_"))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("qsync_fx."))
        todo += ast.iter_child_nodes(node)


def test_siblings_are_loaded_without_cycles() -> None:
    """Of the files and folders in one folder, none imports another that imports it, but within functions."""
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for name, path in SOURCES.items()
    }
    modules = {name if name.startswith("qsync_fx") else f"qsync_fx.{name}": path for name, path in modules.items()}
    beside: dict[str, dict[str, set[str]]] = {}
    for module, path in modules.items():
        for imported in imports(ast.parse(path.read_text()), functions=False):
            target = imported if imported in modules else imported.rpartition(".")[0]
            ours, theirs = module.split("."), target.split(".")
            at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
            if at is not None:
                beside.setdefault(".".join(ours[:at]), {}).setdefault(ours[at], set()).add(theirs[at])
    assert {"qsync_fx", "qsync_fx.passes", "qsync_fx.backend.cuda"} <= beside.keys()
    for siblings in beside.values():
        TopologicalSorter(siblings).prepare()


def test_the_page_on_architecture_tells_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    told = [re.findall(r"`([\w.]+)`", line) for line in re.findall(r"^\d+\. (.+)$", text, flags=re.MULTILINE)]
    assert [" ".join(names) for names in told] == list(LAYERS)


def test_no_module_hides_a_name_of_the_package() -> None:
    """`import qsync_fx.plan` puts a module in place of any `qsync_fx.plan` there is."""
    modules = {module.name for module in pkgutil.iter_modules(qsync_fx.__path__)}
    assert not modules & set(qsync_fx.__all__)
    # A verb is called as the function that it calls; nobody imports its module for the function's name.
    files = {path.stem for name, path in SOURCES.items() if not name.startswith("qsync_fx/cli/commands/")}
    assert not files & set(qsync_fx.__all__)
