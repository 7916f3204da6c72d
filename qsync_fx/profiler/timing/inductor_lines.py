"""Map from the lines of Inductor's wrappers to kernels and operators, and their times.

Inductor records the nodes of each kernel (provenance tracking). A graph from torch's caches has no
provenance, so the map is stored next to the wrapper file, per model.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from qsync_fx import torch_internals as internals
from qsync_fx.errors import ProfileError
from qsync_fx.graph.fx_utils import format_of, tensors
from qsync_fx.graph.node_metadata import CostAttribution, charges
from qsync_fx.profiler.run_statistics import Quantized
from qsync_fx.profiler.timing.step_timers import Seconds
from qsync_fx.serialization.schema import Schema


@dataclass(frozen=True)
class KernelOutput:
    """A node that a kernel computes for an operator, and the bytes it moves; 0 for views.

    `quantizes` has the source format, the target format and the number of elements of a quantizer.
    """

    owner: str | None
    target: str
    bytes: int
    quantizes: tuple[str, str, int] | None


@dataclass(frozen=True)
class InductorKernel:
    """A kernel call: of a library with one node, or of code that Inductor generated."""

    name: str
    library: bool
    nodes: tuple[KernelOutput, ...]


Files = Mapping[str, Mapping[int, InductorKernel]]
"""Kernel called by each line, by the path of the wrapper and the line number."""


@dataclass(frozen=True)
class _StoredLines:
    wrapper: str
    lines: dict[str, InductorKernel]


_STORED = Schema(
    _StoredLines,
    noun="note on compiled code",
    error=ProfileError,
    remedy="remove it",
    name="qsync-kernels",
    largest=64 * 2**20,
)


def keep(wrapper: str, model: str, lines: Mapping[int, InductorKernel]) -> None:
    """Store the kernels of a wrapper for a model; ignore errors of writing."""
    with contextlib.suppress(OSError, ProfileError):
        saved = _StoredLines(_digest(wrapper), {str(index): line for index, line in lines.items()})
        _STORED.write(_path(wrapper, model), _STORED.encode(saved))


def lines_of(wrapper: str, model: str) -> dict[int, InductorKernel] | None:
    with contextlib.suppress(OSError, ValueError, ProfileError):
        saved = _STORED.load(_path(wrapper, model))
        if saved.wrapper == _digest(wrapper):
            return {int(index): kernel for index, kernel in saved.lines.items()}
    return None


def _path(wrapper: str, model: str) -> Path:
    return Path(f"{wrapper}.{hashlib.sha256(model.encode()).hexdigest()[:16]}.json")


def _digest(wrapper: str) -> str:
    return hashlib.sha256(Path(wrapper).read_bytes()).hexdigest()[:16]


_HANDLE = re.compile(r"\[Provenance debug handles\] (.*):(\d+)\s*$")


class WatchedLowering(dict[str, Mapping[int, InductorKernel]]):
    """Kernels of the watched wrappers, by path; `unknown` ones come from a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Disable the graph caches within the context; clear `unknown`, which recompiles."""
        with (
            internals.inductor_config.patch(fx_graph_cache=False),
            internals.functorch_config.patch(enable_autograd_cache=False),
        ):
            yield
        self.unknown.clear()


@contextlib.contextmanager
def watching(model: str = "") -> Iterator[WatchedLowering]:
    """Yield the kernels of wrappers that are compiled or loaded within the context.

    The keys of graph caches lack the operator ids that the digest `model` contains; "" disables the
    caches.
    """
    import torch.compiler.config

    from qsync_fx.torch_internals import GraphLowering, PyCodeCache, inductor_debug as debug

    result = WatchedLowering()
    compile_to_module: Callable[[Any], Any] = GraphLowering.compile_to_module
    load_by_key_path: Callable[..., Any] = PyCodeCache.load_by_key_path

    def noting(lowering: Any) -> Any:
        before = debug._inductor_triton_kernel_to_post_grad_node_info
        debug._inductor_triton_kernel_to_post_grad_node_info = {}
        try:
            module = compile_to_module(lowering)
            made_of = debug._inductor_triton_kernel_to_post_grad_node_info
        finally:
            debug._inductor_triton_kernel_to_post_grad_node_info = before
        result[module.__file__] = _lines(Path(module.__file__), made_of, lowering.module.graph)
        result.unknown.discard(module.__file__)
        if model:
            keep(module.__file__, model, result[module.__file__])
        return module

    def loading(*args: Any, **kwargs: Any) -> Any:
        module = load_by_key_path(*args, **kwargs)
        if model and module.__file__ not in result:
            lines = lines_of(module.__file__, model)
            if lines is None:
                result.unknown.add(module.__file__)
            else:
                result[module.__file__] = lines
        return module

    settings: Any = torch.compiler.config
    # Watched wrappers contain debug handles, so they need their own cache keys.
    tag = f"{settings.cache_key_tag} watched {model}".strip()
    GraphLowering.compile_to_module = noting  # type: ignore[method-assign, assignment]
    PyCodeCache.load_by_key_path = loading  # type: ignore[method-assign]
    try:
        with (
            internals.inductor_config.patch({"trace.provenance_tracking_level": 2}),
            settings.patch(cache_key_tag=tag),
            contextlib.ExitStack() as stack,
        ):
            if not model:
                stack.enter_context(result.anew())
            yield result
    finally:
        GraphLowering.compile_to_module = compile_to_module  # type: ignore
        PyCodeCache.load_by_key_path = load_by_key_path  # type: ignore[method-assign]


def _lines(
    file: Path, made_of: Mapping[str, list[str]], graph: fx.Graph
) -> dict[int, InductorKernel]:
    nodes = {node.name: node for node in graph.nodes}
    reported: dict[int, tuple[str, list[fx.Node]]] = {}
    called: tuple[str, list[fx.Node]] | None = None
    for index, line in enumerate(file.read_text().splitlines(), 1):
        if match := _HANDLE.search(line):
            made = made_of.get(f"{match[1]}:{match[2]}", ())
            called = match[1], [nodes[entry] for entry in made if entry in nodes]
        elif called is not None and line.strip() and not line.lstrip().startswith("#"):
            reported[index], called = called, None
    charged = charges(graph)
    computed = computed_by(graph, list(reported.values()))
    result: dict[int, InductorKernel] = {}
    for (index, (name, _)), kernel_nodes in zip(reported.items(), computed, strict=True):
        outputs = tuple(_output(node, charged.get(node)) for node in kernel_nodes)
        result[index] = InductorKernel(name, _is_library(name), outputs)
    return result


def computed_by(
    graph: fx.Graph, reported: Sequence[tuple[str, Sequence[fx.Node]]]
) -> list[list[fx.Node]]:
    """Return the nodes that each kernel computes, from its name and Inductor's provenance.

    The provenance is too broad around library calls. A library call computes the last of its nodes,
    and no fused kernel computes that node.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    called = [
        max(nodes, key=order.__getitem__) if _is_library(name) and nodes else None
        for name, nodes in reported
    ]
    calls = set(called)
    result: list[list[fx.Node]] = []
    for call, (_, nodes) in zip(called, reported, strict=True):
        if call is not None:
            result.append([call])
        else:
            # Without other nodes, it changes an operand's layout for the call; charge the call.
            result.append([node for node in nodes if node not in calls] or list(nodes))
    return result


def _is_library(name: str) -> bool:
    return not name.startswith(("cpp_", "triton_"))


def _output(node: fx.Node, charge: CostAttribution | None) -> KernelOutput:
    owner, target = charge and charge.owner, str(node.target)
    schema = getattr(node.target, "_schema", None)
    parameters = getattr(schema, "arguments", ())
    aliases = [argument.alias_info for argument in parameters]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    if is_view or node.target is operator.getitem:
        return KernelOutput(owner, target, 0, None)
    values = [node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)]
    read_and_written = [tensor for value in values for tensor in tensors(value)]
    nbytes = sum(int(tensor.numel()) * tensor.element_size() for tensor in read_and_written)
    if schema is None or not schema.name.startswith("qsync::quantize"):
        return KernelOutput(owner, target, nbytes, None)
    names = [argument.name for argument in parameters]
    source, fmt = node.args[0], node.args[names.index("fmt")]
    assert isinstance(source, fx.Node) and isinstance(fmt, str)
    value = source.meta["val"]
    return KernelOutput(owner, target, nbytes, (str(format_of(value)), fmt, int(value.numel())))


Passes = tuple[float, float]


@dataclass(frozen=True)
class Attributed:
    """Times of operators by id, of quantizer calls in execution order, and of the rest."""

    operators: Mapping[str, Passes]
    quantized: list[Quantized]
    nobody: Passes


def attribute(seconds: Seconds, files: Files) -> Attributed:
    """Return the operator and quantizer times of a step, from its line times.

    The time of a fused kernel is split among its nodes by the bytes that each reads and writes.
    Lines without a kernel, such as allocations, count towards the preceding kernel. Quantizers are
    reported separately, as their number depends on the plan. The results add up to the seconds.
    """
    by_file: dict[tuple[str, bool], dict[int, float]] = defaultdict(dict)
    for (file, line, backward), used in seconds.items():
        by_file[file, backward][line] = used
    operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    quantized: list[Quantized] = []
    nobody = [0.0, 0.0]
    for (file, backward), lines in by_file.items():
        for kernel, used in _with_following_lines(lines, files[file]):
            call = _quantizer(kernel, backward, used)
            if call is not None:
                quantized.append(call)
                continue
            owners = _owners(kernel)
            if not owners:
                nobody[backward] += used
            for owner, share in owners.items():
                operators[owner][backward] += used * share
    by_operator = {name: (forward, backward) for name, (forward, backward) in operators.items()}
    return Attributed(by_operator, quantized, (nobody[0], nobody[1]))


def _with_following_lines(
    lines: Mapping[int, float], kernels: Mapping[int, InductorKernel]
) -> list[tuple[InductorKernel, float]]:
    """Return each kernel's seconds, including adjacent lines without a kernel."""
    result: list[tuple[InductorKernel, float]] = []
    before = 0.0
    for line in sorted(lines):
        if line in kernels:
            result.append((kernels[line], before + lines[line]))
            before = 0.0
        elif result:
            result[-1] = result[-1][0], result[-1][1] + lines[line]
        else:
            before += lines[line]
    return result or [(InductorKernel("", False, ()), before)]


def _quantizer(kernel: InductorKernel, backward: bool, used: float) -> Quantized | None:
    if kernel.library:
        for node in kernel.nodes:
            if node.quantizes is not None and node.owner is not None:
                return Quantized(node.owner, *node.quantizes, backward, used)
    return None


def _owners(kernel: InductorKernel) -> dict[str, float]:
    owned = [(node.owner, node.bytes) for node in kernel.nodes if node.owner is not None]
    full = sum(nbytes for _, nbytes in owned)
    shares: dict[str, float] = defaultdict(float)
    for owner, nbytes in owned:
        shares[owner] += nbytes / full if full else 1 / len(owned)
    return shares
