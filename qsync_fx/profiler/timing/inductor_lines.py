"""What each line of the code that Inductor writes computes: the nodes of its last graph, and whose time they take.

Inductor notes for each kernel the nodes that it was made of, and writes the kernel's number above the line that calls it. The numbers begin
anew in each graph, so they are looked up by the file that they stand in.

Invariant: watching changes no code that is compiled. What comes from torch's caches of graphs tells nothing of its nodes: what is known of
it was kept beside it when it was compiled (`kept`), and where that is gone it is compiled again.

What the lines of a wrapper compute, kept beside the wrapper in the folder of Inductor's caches.

torch finds a graph that it compiled before in its caches, which spares most of the time that compiling takes, and says nothing then of the
nodes that kernels were made of.

Invariant: what is kept is of one wrapper and one model: another model may have the same graph, and its operators other ids. A file that
is not there, or not readable, is as good as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from qsync_fx.errors import ProfileError
from qsync_fx.graph.cost_dag import charges
from qsync_fx.graph.fx_utils import format_of, tensors
from qsync_fx.graph.node_metadata import CostAttribution
from qsync_fx.serialization.schema import Schema


@dataclass(frozen=True)
class KernelOutput:
    """A node that a kernel computes.

    Attributes:
        owner: the id of the operator whose time it takes; None where it belongs to none.
        target: what the node calls.
        bytes: what it reads and writes; nothing for what only shows memory in another way.
        quantizes: where it is a quantizer, the names of the formats that it reads and makes, and how many elements; else None.
    """

    owner: str | None
    target: str
    bytes: int
    quantizes: tuple[str, str, int] | None


@dataclass(frozen=True)
class InductorKernel:
    """What one line of a wrapper calls.

    Attributes:
        name: of the kernel, without its number.
        library: whether it is a call of a library, and no code that Inductor has written.
        nodes: what it computes; of a library's call one.
    """

    name: str
    library: bool
    nodes: tuple[KernelOutput, ...]


Files = Mapping[str, Mapping[int, InductorKernel]]
"""By the path of a wrapper: the kernel that each line calls."""


@dataclass(frozen=True)
class _CachedLines:
    """
    Attributes:
        wrapper: a digest of its text.
        lines: the kernel that each calls, by its number.
    """

    wrapper: str
    lines: dict[str, InductorKernel]


_KEPT = Schema(
    _CachedLines,
    noun="note on compiled code",
    error=ProfileError,
    remedy="remove it",
    name="qsync-kernels",
    largest=64 * 2**20,
)


def keep(wrapper: str, model: str, lines: Mapping[int, InductorKernel]) -> None:
    """Keeps what the lines of a wrapper compute for a model; where nothing can be written there, nothing is kept."""
    try:
        saved = _CachedLines(
            _digest(wrapper), {str(index): kernel for index, kernel in lines.items()}
        )
        _KEPT.write(_beside(wrapper, model), _KEPT.encode(saved))
    except (OSError, ProfileError):
        return


def lines_of(wrapper: str, model: str) -> dict[int, InductorKernel] | None:
    """Returns what was kept of a wrapper for a model; None where nothing was."""
    try:
        saved = _KEPT.load(_beside(wrapper, model))
        if saved.wrapper != _digest(wrapper):
            return None
        return {int(index): kernel for index, kernel in saved.lines.items()}
    except (OSError, ValueError, ProfileError):
        return None


def _beside(wrapper: str, model: str) -> Path:
    return Path(f"{wrapper}.{hashlib.sha256(model.encode()).hexdigest()[:16]}.json")


def _digest(wrapper: str) -> str:
    return hashlib.sha256(Path(wrapper).read_bytes()).hexdigest()[:16]


_HANDLE = re.compile(r"\[Provenance debug handles\] (.*):(\d+)\s*$")


class WatchedLowering(dict[str, Mapping[int, InductorKernel]]):
    """
    Attributes:
        unknown: wrappers that came from a cache which has lost what their lines compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    @contextlib.contextmanager
    def anew(self) -> Iterator[None]:
        """Within, nothing comes from caches of graphs; what was unknown is forgotten, as it is compiled again."""
        import torch._functorch.config
        import torch._inductor.config

        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            yield
        self.unknown.clear()


@contextlib.contextmanager
def watching(model: str = "") -> Iterator[WatchedLowering]:
    """Yields what is compiled while this is active: it grows with each wrapper.

    Args:
        model: tells the model and its inputs from others, the ids of its operators too, which caches of graphs do not know; "" to leave
            those caches aside.
    """
    import torch._inductor.config
    import torch.compiler.config
    from torch._inductor import debug
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering

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
    # Wrappers are written with numbers here, and are others than those of the same graph that nobody watches.
    tag = f"{settings.cache_key_tag} watched {model}".strip()
    GraphLowering.compile_to_module = noting  # type: ignore[method-assign, assignment]
    PyCodeCache.load_by_key_path = loading  # type: ignore[method-assign]
    try:
        with (
            torch._inductor.config.patch({"trace.provenance_tracking_level": 2}),
            settings.patch(cache_key_tag=tag),
            contextlib.nullcontext() if model else result.anew(),
        ):
            yield result
    finally:
        GraphLowering.compile_to_module = compile_to_module  # type: ignore[method-assign, assignment]
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
    return {
        index: InductorKernel(
            name, _is_library(name), tuple(_computed(node, charged.get(node)) for node in of)
        )
        for (index, (name, _)), of in zip(
            reported.items(), computed_by(graph, list(reported.values())), strict=True
        )
    }


def computed_by(
    graph: fx.Graph, reported: Sequence[tuple[str, Sequence[fx.Node]]]
) -> list[list[fx.Node]]:
    """Returns which nodes kernels compute, from the name of each and what Inductor tells of it.

    It tells too much on both sides of a library's call whose operands are not in memory when it comes to the call: of the call, if it has
    several results as the gradients of a convolution are, all nodes that its operands are made of, and of the kernels that then write the
    operands, the call. But a call computes what it was made for, the last of its nodes, and no fused kernel computes that.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    called = [
        max(nodes, key=order.__getitem__) if _is_library(name) and nodes else None
        for name, nodes in reported
    ]
    calls = set(called)
    return [
        # Where nothing else is left it turns an operand as the call wants it, which is work for that call.
        [call] if call is not None else [node for node in nodes if node not in calls] or list(nodes)
        for call, (_, nodes) in zip(called, reported, strict=True)
    ]


def _is_library(name: str) -> bool:
    return not name.startswith(("cpp_", "triton_"))


def _computed(node: fx.Node, charge: CostAttribution | None) -> KernelOutput:
    owner = None if charge is None else charge.owner
    return KernelOutput(
        owner, str(node.target), 0 if _shows(node) else _moved(node), _quantizes(node)
    )


def _shows(node: fx.Node) -> bool:
    """Whether a node's value lies in the memory of what it reads."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        argument.alias_info is not None and not argument.alias_info.is_write
        for argument in schema.arguments
    )


def _moved(node: fx.Node) -> int:
    values = [node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)]
    return sum(
        int(tensor.numel()) * tensor.element_size() for value in values for tensor in tensors(value)
    )


def _quantizes(node: fx.Node) -> tuple[str, str, int] | None:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith("qsync::quantize"):
        return None
    source, fmt = (
        node.args[0],
        node.args[[argument.name for argument in schema.arguments].index("fmt")],
    )
    assert isinstance(source, fx.Node) and isinstance(fmt, str)
    value = source.meta["val"]
    return str(format_of(value)), fmt, int(value.numel())
