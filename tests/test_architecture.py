"""Architecture rules: only their tables list formats and operators, and imports follow the layers.

A new format, operator or pass therefore changes only the files that its how-to page lists.
"""

from __future__ import annotations

import ast
import functools
import operator
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import networkx as nx
import torch

import qsync_fx
from qsync_fx import torch_internals
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
    return {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }


def imported_names(path: Path) -> set[str]:
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name for node in nodes if node.module == "os" for alias in node.names}


def test_only_the_table_lists_formats() -> None:
    """FP32 and FP64 are the formats of models, so any file may name them.

    Files name narrower formats only if it is unavoidable.
    """
    narrow = {fmt.name for fmt in FORMATS.values() if fmt.bits < 32}
    # The files in backend/cuda describe the units and instructions for each format.
    sources = {name: path for name, path in SOURCES.items() if not name.startswith("backend/cuda/")}
    named = {name: formats for name, path in sources.items() if (formats := strings(path) & narrow)}
    because = {
        "qsync_fx/formats.py": "the table",
        "qsync_fx/option_help.py": "recipes, whose options are formats",
        "qsync_fx/devices/format_support.py": "which devices have which units, and what runs when the user asks for nothing",
        "qsync_fx/devices/cpu_features.py": "instruction sets of CPUs, one of which is called bf16",
        "qsync_fx/graph/fx_utils.py": "the short name of a torch type in texts of graphs is bf16",
    }
    assert named.keys() == because.keys(), {
        name: named.get(name) for name in named.keys() ^ because.keys()
    }
    assert named["qsync_fx/graph/fx_utils.py"] == {"bf16"}


def test_only_the_table_lists_dtypes() -> None:
    narrow = {str(fmt.dtype) for fmt in FORMATS.values() if fmt.dtype.itemsize < 4}
    named = {
        name
        for name, path in SOURCES.items()
        if attributes(path) & narrow and not name.startswith("backend/cuda/")
    }
    because = {
        "qsync_fx/formats.py": "the table",
        "qsync_fx/graph/fx_utils.py": "short names of torch types in texts of graphs; one that has none shows its long name",
        "backend/numerics/native.py": "what the kernels of the native module take",
        "backend/operators/gemm/int_mm.py": "what torch's integer product takes",
        "backend/operators/gemm/cpu_kernels.py": "what the native module multiplies, and gives out",
        "backend/inductor/layouts.py": "the one type of which oneDNN's gradients of some convolutions were measured to be "
        "slow",
        "backend/inductor/recompute_policy.py": "a byte that says yes or no, and is no number",
    }
    assert named == because.keys()


def test_no_pass_names_an_operator() -> None:
    """Passes read an operator's properties from its row, and call only the conversions that they
    insert.
    """
    names = {row.name for row in table().values() if row.kind is Kind.ADJUSTABLE} | set(lowerings())
    called = {
        f"torch.ops.aten.{name}"
        for row in table().values()
        for name in (row.name, f"{row.name}_")
        if row.name in names
    }
    for name, path in SOURCES.items():
        if name.startswith("passes/"):
            assert not strings(path) & names, name
            assert not any("aten::" in text for text in strings(path)), name
            assert not attributes(path) & called, name


def test_operators_with_scaled_formats_have_a_row_and_a_lowering() -> None:
    assert {row.name for row in table().values() if row.may_scale} == set(lowerings())


def test_each_pass_has_one_file() -> None:
    for step in pipeline(Options(), lowerings()):
        assert type(step).__module__ == f"qsync_fx.passes.{step.name}"


def test_single_file_reads_environment_variables() -> None:
    names = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
    readers = {
        name
        for name, path in SOURCES.items()
        if attributes(path) & names or "environ" in imported_names(path)
    }
    assert readers == {"qsync_fx/environment.py"}


LAYERS = (
    "lazy_names",
    "errors torch_internals formatting text_tables module_paths option_help html_view",
    "autocast_policy environment entry_points formats progress rounding",
    "serialization ops",
    "devices plan",
    "options",
    "graph",
    "coverage predictor",
    "passes communication optim",
    "backend",
    "diagnostics plan_switching",
    "profiler",
    "timeline",
    "allocator",
    "distributed report",
    "cli integrations monitoring",
)
"""Packages from the bottom to the top.

A package imports only packages of earlier lines.
"""
LONGEST_CYCLE = 5


def module_of(name: str) -> str:
    """Return the dotted name of a file under ROOT."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return module if module.startswith("qsync_fx") else f"qsync_fx.{module}"


MODULES = {module_of(name): path for name, path in SOURCES.items()}


def loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run at the loading of a module, without functions or TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not typing_only and not isinstance(node, ast.FunctionDef):
            yield node
            yield from loaded(node)


@functools.cache
def imported_modules(path: Path, deferred: bool = True) -> frozenset[str]:
    """Return the project's modules that a file imports; without `deferred`, only those it loads.

    Deferred imports are those inside functions, under TYPE_CHECKING and in the stub of the file. In
    a file that uses importlib, each string that is the name of a module counts too.
    """
    result: set[str] = set()
    tree = ast.parse(path.read_text())
    if deferred and (stub := path.with_suffix(".pyi")).exists():
        tree.body += ast.parse(stub.read_text()).body
    has_importlib = deferred and any(
        isinstance(node, ast.Name) and node.id == "importlib" for node in ast.walk(tree)
    )
    for node in ast.walk(tree) if deferred else loaded(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            result |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif has_importlib and isinstance(node, ast.Constant) and isinstance(node.value, str):
            result.add(node.value)
    return frozenset(name for name in result & MODULES.keys() if MODULES[name] != path)


def layer(module: str) -> tuple[int, str]:
    """Return the number of a module's layer, and its package."""
    package = module.split(".")[1]
    numbers = [number for number, names in enumerate(LAYERS) if package in names.split()]
    assert numbers, f"{module} is in no layer: add it to LAYERS and to docs/architecture.md"
    return numbers[0], package


FACADES = ("qsync_fx", "qsync_fx.passes", "qsync_fx.backend")
"""Packages whose __init__ re-exports names of any layer."""


def test_imports_follow_the_layers() -> None:
    for module, path in MODULES.items():
        if module in FACADES:
            continue
        number, package = layer(module)
        for imported in imported_modules(path) - set(FACADES):
            below, other = layer(imported)
            assert other == package or below < number, (
                f"{module} imports {imported}, which is not in a lower layer"
            )


def test_import_cycles_are_short() -> None:
    graph = nx.DiGraph()
    for module, path in MODULES.items():
        graph.add_edges_from(
            (module, imported) for imported in imported_modules(path) - set(FACADES)
        )
    graph.remove_nodes_from(FACADES)
    assert graph.number_of_edges() > len(MODULES), "the import graph is not empty"
    for cycle in nx.strongly_connected_components(graph):
        assert len(cycle) <= LONGEST_CYCLE, f"the import cycle is too long: {sorted(cycle)}"


def test_siblings_are_loaded_without_cycles() -> None:
    """The files and folders of a folder do not load each other in cycles."""
    siblings: dict[str, nx.DiGraph] = {}
    for module, path in MODULES.items():
        for imported in imported_modules(path, deferred=False):
            ours, theirs = module.split("."), imported.split(".")
            pairs = enumerate(zip(ours, theirs, strict=False))
            depth = next((number for number, (a, b) in pairs if a != b), None)
            if depth is not None:
                graph = siblings.setdefault(".".join(ours[:depth]), nx.DiGraph())
                graph.add_edge(ours[depth], theirs[depth])
    assert {"qsync_fx", "qsync_fx.passes", "qsync_fx.backend.cuda"} <= siblings.keys()
    for folder, graph in siblings.items():
        assert nx.is_directed_acyclic_graph(graph), (folder, nx.find_cycle(graph))


def test_imports_of_every_kind_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import importlib\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from qsync_fx.graph import operator_costs\n"
        "def later():\n"
        "    import qsync_fx.errors\n"
        "    importlib.import_module('qsync_fx.formats')\n"
        "    from qsync_fx.plan.plan import Plan\n"
    )
    expected = {
        "qsync_fx.graph.operator_costs",
        "qsync_fx.errors",
        "qsync_fx.formats",
        "qsync_fx.plan.plan",
    }
    assert imported_modules(path) == expected
    assert imported_modules(path, deferred=False) == set()


def test_architecture_page_lists_the_layers() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    layers = [
        re.findall(r"`([\w.]+)`", line)
        for line in re.findall(r"^\d+\. (.+)$", text, flags=re.MULTILINE)
    ]
    assert [" ".join(names) for names in layers] == list(LAYERS)


def test_no_module_hides_a_name_of_the_package() -> None:
    """`import qsync_fx.plan` replaces any other attribute `qsync_fx.plan` by the module."""
    modules = {module.name for module in pkgutil.iter_modules(qsync_fx.__path__)}
    assert not modules & set(qsync_fx.__all__)
    # Modules of verbs may have the name of the function that they call: users do not import them.
    files = {
        path.stem for name, path in SOURCES.items() if not name.startswith("qsync_fx/cli/commands/")
    }
    assert not files & set(qsync_fx.__all__)


@functools.cache
def torch_names(path: Path) -> frozenset[str]:
    """Return the dotted names of modules and attributes that a file imports or reads.

    Names start with the imported module, even if the file uses an alias.
    """
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported: dict[str, str] = {}
    result: set[str] = set()
    for node in nodes:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            name = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"  # type: ignore[union-attr]
            result.add(name)
            plain = isinstance(node, ast.Import) and not alias.asname
            top = name.partition(".")[0]
            imported[top if plain else alias.asname or alias.name] = top if plain else name
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", text := ast.unparse(node)):
            first, *others = text.split(".")
            result.add(".".join([imported.get(first, ""), *others]))
    return frozenset(result)


def private_in_torch(name: str) -> bool:
    """Return whether a name is torch's and private; those under `torch.ops` name operators."""
    module, *parts = name.split(".")
    private = (part.startswith("_") and not part.startswith("__") for part in parts)
    return module == "torch" and parts[:1] != ["ops"] and any(private)


def test_single_file_uses_private_names_of_torch() -> None:
    users = {
        name: private
        for name, path in SOURCES.items()
        if (private := sorted(filter(private_in_torch, torch_names(path))))
    }
    assert not users, "add these names to qsync_fx/torch_internals.py"


def test_private_names_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import torch, torch._dynamo.config\n"
        "import torch.distributed.distributed_c10d as groups\n"
        "from torch.utils import _pytree as pytree\n"
        "def later():\n"
        "    from torch._ops import OpOverload as Overload\n"
        "    return torch._C._x(), groups._world, torch.__version__, torch.ops.aten._to_copy.default\n"
    )
    assert set(filter(private_in_torch, torch_names(path))) == {
        "torch._dynamo.config",
        "torch.utils._pytree",
        "torch._ops.OpOverload",
        "torch._C",
        "torch._C._x",
        "torch.distributed.distributed_c10d._world",
    }


def test_torch_has_the_private_names() -> None:
    """With a new version of torch, the failure lists the missing names."""
    optional = torch_internals.OPTIONAL
    if torch.version.cuda:
        optional -= {name for name in optional if name.startswith("_cuda_")}
    names = torch_internals.PATHS.keys() - optional
    prefix = f"{torch_internals.__name__}."
    read = {
        name.removeprefix(prefix)
        for path in SOURCES.values()
        for name in torch_names(path)
        if name.startswith(prefix)
    }
    assert {name.partition(".")[0] for name in read} <= torch_internals.PATHS.keys()
    assert "inductor_debug._inductor_triton_kernel_to_post_grad_node_info" in read
    modules = {
        name for name in names if isinstance(getattr(torch_internals, name, None), ModuleType)
    }
    names |= {name for name in read if name.partition(".")[0] in modules}
    missing = {}
    for name in sorted(names):
        try:
            operator.attrgetter(name)(torch_internals)
        except (AttributeError, ImportError) as error:
            missing[name] = str(error)
    assert not missing, f"torch {torch.__version__} lacks these private names"
    unused = torch_internals.PATHS.keys() - {name.partition(".")[0] for name in read}
    assert unused == {"_empty_strided_cpu"}, (
        "_empty_strided_cpu is read by getattr; delete the other unused names"
    )


def test_types_of_private_names_are_those_of_the_table() -> None:
    stub = ast.parse(SOURCES["qsync_fx/torch_internals.py"].with_suffix(".pyi").read_text())
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }
    declared = {ast.unparse(node.target) for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert imported.items() <= torch_internals.PATHS.items()
    assert declared - {"OPTIONAL", "PATHS"} == torch_internals.PATHS.keys() - imported.keys()
    exported = next(node.value for node in stub.body if isinstance(node, ast.Assign))
    assert set(ast.literal_eval(exported)) == imported.keys()
