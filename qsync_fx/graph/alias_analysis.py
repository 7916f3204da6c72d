"""Which values of a graph may share memory, and which nodes write to it.

Invariant: values that share memory share a place. The converse need not hold: what a node does that nobody can look into is taken for
the worst. Places are the storages of fake tensors, which alias as the tensors of a run do, whatever a schema says of it (a `reshape` or
a conversion that changes nothing returns its input).

What a node writes to.

Invariant: told by the schema, or by the operator's row where the schema keeps silent.

What crosses the border of a higher-order operator that just calls its body, as activation checkpointing does.

Invariant: such a border changes nothing: formats, casts and random numbers are those of the body written in its place. So a model trains to
the same bits with checkpointing as without, and what is kept for the recomputation is kept in the narrow format.

How far one cast is shared: the pass that inserts casts and the rules that check them ask here.

Invariant: a cast of a tensor stands in for another one exactly if nothing between the two may write to the tensor, and both record
gradients or neither does. A cast from before a write holds a stale value; one that was made without gradients loses them. What a node
reads it reads before it writes.
"""

from __future__ import annotations

import operator as py_operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import arguments, is_switch, switches_grad, tensors
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops import row_for


def writes(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a node writes to in place, whether its schema says so or its row."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    row = row_for(node.target)
    written: list[fx.Node] = []
    for index, (argument, value) in enumerate(
        zip(node.target._schema.arguments, arguments(node).values(), strict=True)
    ):
        text = argument.alias_info is not None and argument.alias_info.is_write
        if text or (row is not None and index in row.writes):
            fx.node.map_arg(value, written.append)
    return written


def in_place(node: fx.Node) -> bool:
    """Whether a node's result is one of its arguments, written to (a batch norm writes to its statistics, but returns another tensor)."""
    written = writes(node)
    return (
        bool(written)
        and written[0] is node.args[0]
        and str(node.target.__name__).partition(".")[0].endswith("_")  # type: ignore[union-attr]
    )


def operands(node: fx.Node, body: PrecisionGraph) -> list[tuple[fx.Node, Any]]:
    """Returns the placeholders of a body, each with the argument of the higher-order operator that it stands for."""
    placeholders = [p for p in body.nodes if p.op == "placeholder"]
    return list(zip(placeholders, node.args[1:], strict=True))


def results(body: PrecisionGraph) -> tuple[Any, ...]:
    """Returns what a body returns: the nodes that `getitem` takes from the higher-order operator."""
    returned = body.nodes[-1].args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def result_of(node: fx.Node) -> fx.Node | None:
    """Returns the node inside a body that a `getitem` outside of it takes; None for any other node."""
    if node.target is not py_operator.getitem:
        return None
    source, index = node.args
    bodies = node_metadata.bodies(source) if isinstance(source, fx.Node) else None
    result = results(bodies[0])[index] if bodies and isinstance(index, int) else None
    return result if isinstance(result, fx.Node) else None


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read a node's value, on whichever side of a border."""
    for user in node.users:
        caller = node_metadata.CALLER.get(user)
        if bodies := node_metadata.bodies(user):
            for placeholder, inputs in operands(user, bodies[0]):
                if inputs is node:
                    yield from readers(placeholder)
        elif user.op == "output" and caller is not None:
            for used in caller.users:
                if result_of(used) is node:
                    yield from readers(used)
        else:
            yield user


def handed_in(body: PrecisionGraph, node: fx.Node, value: fx.Node, name: str) -> fx.Node:
    """Returns a new last placeholder of a body, and gives the higher-order operator `node` the argument for it."""
    graph, placeholders = body.graph, [n for n in body.nodes if n.op == "placeholder"]
    with (
        graph.inserting_after(placeholders[-1])
        if placeholders
        else graph.inserting_before(body.nodes[0])
    ):
        result = graph.placeholder(name)
    result.target = result.name  # the name of an argument, of which there may be several
    result.meta["val"] = value.meta["val"]
    node.args = (*node.args, value)
    return result


Places = frozenset[Hashable]


class AliasSets:
    """The places of every node of a graph, as its values are when this is made.

    Args:
        given: for the body of a higher-order operator, the places of its placeholders outside of it.

    Attributes:
        written: the places that some node of the graph writes to.
    """

    def __init__(
        self, graph: PrecisionGraph, value: Mapping[fx.Node, Places] | None = None
    ) -> None:
        self._graph = graph
        self._beyond: dict[fx.Node, Places] = dict(value or {})
        self._places: dict[fx.Node, Places] = {}
        for node in graph.nodes:
            self._beyond.setdefault(node, self._inherited(node))
            self._places[node] = self.of(node)
        self.written: Places = frozenset().union(
            *(self.of(used) for node in graph.nodes for used in may_write(node))
        )

    def of(self, node: fx.Node) -> Places:
        """Returns the places of a node's value; for a node that came later, those of its value now."""
        if node in self._places:
            return self._places[node]
        return _storages(self._graph.value(node)) | self._beyond.get(node, frozenset())

    def put(self, node: fx.Node, instead_of: fx.Node) -> None:
        """Gives a new node the places of the one that it stands in for."""
        self._places[node] = self.of(instead_of)

    def _inherited(self, node: fx.Node) -> Places:
        """The places that a node's value may have and its fake tensors cannot show."""
        if node.op not in ("call_function", "call_method") or is_switch(node):
            return frozenset()
        if node.target is py_operator.getitem and isinstance(node.args[0], fx.Node):
            return self._beyond.get(node.args[0], frozenset())
        if isinstance(node.target, torch._ops.OpOverload) and not _sizes_are_kept(node):
            return frozenset()
        return frozenset((node,)).union(*map(self.of, node.all_input_nodes))


def may_write(node: fx.Node) -> list[fx.Node]:
    """Returns the operands that a node may write to; of a node that nobody can look into, all."""
    if (
        node.op not in ("call_function", "call_method")
        or is_switch(node)
        or node.target is py_operator.getitem
    ):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        return writes(node)
    if bodies := node_metadata.bodies(node):
        return [used for body in bodies for used in _written_by(body, node)]
    return node.all_input_nodes


def _written_by(body: PrecisionGraph, node: fx.Node) -> Iterable[fx.Node]:
    """Yields the operands of a higher-order operator that its body writes to."""
    memory = AliasSets(body)
    for placeholder, operand in operands(node, body):
        if isinstance(operand, fx.Node) and memory.of(placeholder) & memory.written:
            yield operand


def _sizes_are_kept(node: fx.Node) -> bool:
    """Whether a view's value is the one that it was traced with, since its sizes depend on values (`PrecisionGraph.propagate`)."""
    return bool(node.meta.get("unbacked_bindings")) and any(
        r.alias_info
        for r in node.target._schema.returns  # type: ignore[union-attr]
    )


def _storages(value: Any) -> Places:
    return frozenset(_storage(t) for t in tensors(value))


def _storage(tensor: torch.Tensor) -> Hashable:
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        # Sparse tensors have none of their own; nothing writes to a part of one.
        return id(tensor)


Epoch = tuple[Hashable, int]


class Sharing:
    """Walks a graph from its first node to its last: `passed` is called with each, once all that it reads has been dealt with."""

    def __init__(self, graph: PrecisionGraph, memory: AliasSets | None = None) -> None:
        self.memory = memory or AliasSets(graph)
        # What a body starts with is its caller's affair.
        self.mode: tuple[Hashable, ...] = (
            graph.context.training if graph.parent is None else None,
        )
        self._writes: Counter[Hashable] = Counter()
        self._modes: dict[fx.Node, Hashable] = {}

    def epoch(self, source: fx.Node) -> Epoch:
        """Returns what two casts of a tensor have in common that may be one."""
        return self.mode, self.writes(source)

    def writes(self, source: fx.Node) -> int:
        """Returns how many writes so far may have changed a tensor."""
        return sum(self._writes[place] for place in self.memory.of(source))

    def records_as_here(self, node: fx.Node) -> bool:
        """Whether gradients are recorded here as they were where the node stands."""
        return self._modes.get(node, self.mode) == self.mode

    def passed(self, node: fx.Node) -> None:
        self._modes[node] = self.mode
        if switches_grad(node):
            self.mode = _switched(self.mode, node)
        for used in may_write(node):
            self._writes.update(self.memory.of(used))


def _switched(mode: tuple[Hashable, ...], node: fx.Node) -> tuple[Hashable, ...]:
    """The mode after a switch: whether gradients are recorded, then the regions of inference mode that are open."""
    if "exit" in getattr(node.target, "__name__", ""):
        return (mode[0], *(region for region in mode[1:] if region is not node.args[0]))
    if "enter" in getattr(node.target, "__name__", ""):
        return (*mode, node)
    return (bool(node.args[0]), *mode[1:])
