"""What each line of the code that Inductor writes computes: the nodes of its last graph, and whose time they take.

Inductor notes for each kernel the nodes that it was made of, and writes the kernel's number above the line that calls it. The numbers begin
anew in each graph, so they are looked up by the file that they stand in.

Invariant: watching changes no code that is compiled, but that caches of graphs are left aside: what comes from there tells nothing of its
nodes. Caches of compiled kernels serve as ever.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from qsync_fx.graph.charging import charges
from qsync_fx.graph.meta import Charge
from qsync_fx.graph.values import format_of, tensors


@dataclass(frozen=True)
class Computed:
    """A node that a kernel computes.

    Attributes:
        charge: whose time it takes; None where it belongs to no operator.
        target: what the node calls.
        bytes: what it reads and writes; nothing for what only shows memory in another way.
        quantizes: where it is a quantizer, the names of the formats that it reads and makes, and how many elements; else None.
    """

    charge: Charge | None
    target: str
    bytes: int
    quantizes: tuple[str, str, int] | None


@dataclass(frozen=True)
class Kernel:
    """What one line of a wrapper calls.

    Attributes:
        name: of the kernel, without its number.
        library: whether it is a call of a library, and no code that Inductor has written.
        nodes: what it computes; of a library's call one.
    """

    name: str
    library: bool
    nodes: tuple[Computed, ...]


Files = Mapping[str, Mapping[int, Kernel]]
"""By the path of a wrapper: the kernel that each line calls."""

_HANDLE = re.compile(r"\[Provenance debug handles\] (.*):(\d+)\s*$")


@contextlib.contextmanager
def watching() -> Iterator[Files]:
    """Yields what is compiled while this is active: it grows with each wrapper."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor import debug
    from torch._inductor.graph import GraphLowering

    found: dict[str, dict[int, Kernel]] = {}
    compile_to_module: Callable[[Any], Any] = GraphLowering.compile_to_module

    def noting(lowering: Any) -> Any:
        kept = debug._inductor_triton_kernel_to_post_grad_node_info
        debug._inductor_triton_kernel_to_post_grad_node_info = {}
        try:
            module = compile_to_module(lowering)
            made_of = debug._inductor_triton_kernel_to_post_grad_node_info
        finally:
            debug._inductor_triton_kernel_to_post_grad_node_info = kept
        found[module.__file__] = _lines(Path(module.__file__), made_of, lowering.module.graph)
        return module

    settings = {"fx_graph_cache": False, "trace.provenance_tracking_level": 2}
    GraphLowering.compile_to_module = noting  # type: ignore[method-assign, assignment]
    try:
        with torch._inductor.config.patch(settings), torch._functorch.config.patch(enable_autograd_cache=False):
            yield found
    finally:
        GraphLowering.compile_to_module = compile_to_module  # type: ignore[method-assign, assignment]


def _lines(file: Path, made_of: Mapping[str, list[str]], graph: fx.Graph) -> dict[int, Kernel]:
    nodes = {node.name: node for node in graph.nodes}
    told: dict[int, tuple[str, list[fx.Node]]] = {}
    called: tuple[str, list[fx.Node]] | None = None
    for at, line in enumerate(file.read_text().splitlines(), 1):
        if match := _HANDLE.search(line):
            made = made_of.get(f"{match[1]}:{match[2]}", ())
            called = match[1], [nodes[known] for known in made if known in nodes]
        elif called is not None and line.strip() and not line.lstrip().startswith("#"):
            told[at], called = called, None
    charged = charges(graph)
    return {
        at: Kernel(name, _is_library(name), tuple(_computed(node, charged.get(node)) for node in of))
        for (at, (name, _)), of in zip(told.items(), computed_by(graph, list(told.values())), strict=True)
    }


def computed_by(graph: fx.Graph, told: Sequence[tuple[str, Sequence[fx.Node]]]) -> list[list[fx.Node]]:
    """Returns which nodes kernels compute, from the name of each and what Inductor tells of it.

    It tells too much on both sides of a library's call whose operands are not in memory when it comes to the call: of the call, if it has
    several results as the gradients of a convolution are, all nodes that its operands are made of, and of the kernels that then write the
    operands, the call. But a call computes what it was made for, the last of its nodes, and no fused kernel computes that.
    """
    order = {node: at for at, node in enumerate(graph.nodes)}
    called = [max(nodes, key=order.__getitem__) if _is_library(name) and nodes else None for name, nodes in told]
    calls = set(called)
    return [
        # Where nothing else is left it turns an operand as the call wants it, which is work for that call.
        [call] if call is not None else [node for node in nodes if node not in calls] or list(nodes)
        for call, (_, nodes) in zip(called, told, strict=True)
    ]


def _is_library(name: str) -> bool:
    return not name.startswith(("cpp_", "triton_"))


def _computed(node: fx.Node, charge: Charge | None) -> Computed:
    return Computed(charge, str(node.target), 0 if _shows(node) else _moved(node), _quantizes(node))


def _shows(node: fx.Node) -> bool:
    """Whether a node's value lies in the memory of what it reads."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments
    )


def _moved(node: fx.Node) -> int:
    values = [node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)]
    return sum(int(tensor.numel()) * tensor.element_size() for value in values for tensor in tensors(value))


def _quantizes(node: fx.Node) -> tuple[str, str, int] | None:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith("qsync::quantize"):
        return None
    source, fmt = node.args[0], node.args[[argument.name for argument in schema.arguments].index("fmt")]
    assert isinstance(source, fx.Node) and isinstance(fmt, str)
    value = source.meta["val"]
    return str(format_of(value)), fmt, int(value.numel())
