"""Alias analysis: values that share memory, in-place writes, and the sharing of casts.

Places are the storages of fake tensors, which alias like real tensors even if the schema differs.
The analysis is conservative: an opaque node may alias and write all its operands. Higher-order
operators that only call their body, such as activation checkpointing, are transparent.
"""

from __future__ import annotations

import operator as py_operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import (
    arguments,
    function_name,
    is_float,
    is_switch,
    storage_of,
    switches_grad,
    tensors,
)
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.ops import row_for
from qsync_fx.torch_internals import OpOverload


def writes(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes to, by its schema or its row."""
    if not isinstance(node.target, OpOverload):
        return []
    by_row = getattr(row_for(node.target), "writes", ())
    written: list[fx.Node] = []
    values = arguments(node).values()
    pairs = zip(node.target._schema.arguments, values, strict=True)
    for index, (argument, value) in enumerate(pairs):
        by_schema = argument.alias_info is not None and argument.alias_info.is_write
        if by_schema or index in by_row:
            fx.node.map_arg(value, written.append)
    return written


def in_place(node: fx.Node) -> bool:
    """Return whether a node returns the argument that it writes to, unlike a batch norm."""
    written = writes(node)
    if not written or written[0] is not node.args[0]:
        return False
    return function_name(node).partition(".")[0].endswith("_")


def operands(node: fx.Node, body: PrecisionGraph) -> list[tuple[fx.Node, Any]]:
    """Return a body's placeholders, each with its argument of the higher-order operator."""
    placeholders = [p for p in body.nodes if p.op == "placeholder"]
    return list(zip(placeholders, node.args[1:], strict=True))


def results(body: PrecisionGraph) -> tuple[Any, ...]:
    """Return the results of a body, which `getitem` nodes unpack from the higher-order operator."""
    returned = body.nodes[-1].args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def result_of(node: fx.Node) -> fx.Node | None:
    """Return the node inside a body that a `getitem` outside unpacks; None for other nodes."""
    if node.target is not py_operator.getitem:
        return None
    source, index = node.args
    if not isinstance(source, fx.Node) or not isinstance(index, int):
        return None
    bodies = node_metadata.bodies(source)
    if not bodies:
        return None
    result = results(bodies[0])[index]
    return result if isinstance(result, fx.Node) else None


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a node's value, across boundaries of bodies."""
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


def caller_of(body: PrecisionGraph) -> fx.Node:
    """Return the higher-order operator that calls a body."""
    assert body.parent is not None
    return next(node for node in body.parent.nodes if body in node_metadata.bodies(node))


def handed_in(body: PrecisionGraph, value: fx.Node, name: str) -> fx.Node:
    """Return the placeholder for a value of the calling graph, appended if there is none."""
    node = caller_of(body)
    for inner, outer in operands(node, body):
        if outer is value:
            return inner
    first = next(n for n in body.nodes if n.op != "placeholder")
    with body.graph.inserting_before(first):
        result = body.graph.placeholder(name)
    result.target = result.name  # argument names must be unique
    result.meta["val"] = value.meta["val"]
    node.args = (*node.args, value)
    return result


Places = frozenset[Hashable]
_NO_PLACES: Mapping[fx.Node, Places] = MappingProxyType({})


class AliasSets:
    """Places of the values in a graph, computed once, and those that some node writes to.

    For the body of a higher-order operator, `outer` has the outer places of its placeholders.
    """

    def __init__(self, graph: PrecisionGraph, outer: Mapping[fx.Node, Places] = _NO_PLACES) -> None:
        self._graph = graph
        self._beyond = dict(outer)
        self._places: dict[fx.Node, Places] = {}
        for node in graph.nodes:
            self._beyond.setdefault(node, self._inherited(node))
            self._places[node] = self.of(node)
        written = (used for node in graph.nodes for used in may_write(node))
        self.written: Places = frozenset().union(*map(self.of, written))

    def of(self, node: fx.Node) -> Places:
        """Return the places of a node's value; for a later node, places of its current value."""
        if node in self._places:
            return self._places[node]
        storages = frozenset(map(storage_of, tensors(self._graph.value(node))))
        return storages | self._beyond.get(node, frozenset())

    def put(self, node: fx.Node, instead_of: fx.Node) -> None:
        """Give a new node the places of the node that it replaces."""
        self._places[node] = self.of(instead_of)

    def _inherited(self, node: fx.Node) -> Places:
        """Return the places of a node's value that its fake tensors cannot show."""
        if node.op not in ("call_function", "call_method") or is_switch(node):
            return frozenset()
        if node.target is py_operator.getitem and isinstance(node.args[0], fx.Node):
            return self._beyond.get(node.args[0], frozenset())
        if isinstance(node.target, OpOverload):
            returns = node.target._schema.returns
            # `PrecisionGraph.propagate` does not update the sizes of such a view.
            if not (node.meta.get("unbacked_bindings") and any(r.alias_info for r in returns)):
                return frozenset()
        return frozenset((node,)).union(*map(self.of, node.all_input_nodes))


def may_write(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node may write to; all operands of an opaque node."""
    if node.op not in ("call_function", "call_method") or is_switch(node):
        return []
    if node.target is py_operator.getitem:
        return []
    if isinstance(node.target, OpOverload):
        return writes(node)
    if bodies := node_metadata.bodies(node):
        return [used for body in bodies for used in _written_by(body, node)]
    return node.all_input_nodes


def _written_by(body: PrecisionGraph, node: fx.Node) -> Iterable[fx.Node]:
    """Yield the operands of a higher-order operator that its body writes to."""
    memory = AliasSets(body)
    for placeholder, operand in operands(node, body):
        if isinstance(operand, fx.Node) and memory.of(placeholder) & memory.written:
            yield operand


Epoch = tuple[Hashable, int]


class Sharing:
    """Walk over a graph that decides how far a cast can be shared.

    Call `passed` with each node in order, after its operands: a node reads before it writes. Two
    casts of a tensor are interchangeable exactly if no node between them may write to the tensor,
    and both record gradients or neither does.
    """

    def __init__(self, graph: PrecisionGraph, memory: AliasSets | None = None) -> None:
        self._graph, self.memory = graph, memory or AliasSets(graph)
        self.mode: tuple[Hashable, ...] = (graph.context.training,)
        if graph.parent is not None:
            self.mode = (None,)  # the grad mode at the start of a body depends on its caller
        self._writes: Counter[Hashable] = Counter()
        self._modes: dict[fx.Node, Hashable] = {}

    def epoch(self, source: fx.Node) -> Epoch:
        """Return a key that is equal for interchangeable casts of a tensor."""
        return self.mode, self.writes(source)

    def writes(self, source: fx.Node) -> int:
        """Return how many writes so far may have changed a tensor."""
        return sum(self._writes[place] for place in self.memory.of(source))

    def origin(self, node: fx.Node) -> fx.Node:
        """Return the node that a cast of `node` converts, before conversions that casts replace."""
        while node.target is torch.ops.aten.to.dtype and self._may_be_skipped(node):
            (node,) = node.all_input_nodes
        return node

    def _may_be_skipped(self, conversion: fx.Node) -> bool:
        """Return whether a conversion is lossless, or lossy for the sake of autocast alone."""
        source: Any = conversion.args[0]
        before, after = self._graph.value(source), self._graph.value(conversion)
        if not is_float(before) or not is_float(after):
            return False
        places = self.memory.of(conversion)
        if not node_metadata.is_cast(conversion):
            # The model may use a conversion to copy a tensor that is written to later.
            places |= self.memory.of(source)
        if places & self.memory.written or self._modes.get(conversion, self.mode) != self.mode:
            return False
        lossless = torch.promote_types(before.dtype, after.dtype) is after.dtype
        return lossless or node_metadata.has_purpose(conversion, node_metadata.Purpose.AUTOCAST)

    def passed(self, node: fx.Node) -> None:
        self._modes[node] = self.mode
        if switches_grad(node):
            self.mode = _switched(self.mode, node)
        for used in may_write(node):
            self._writes.update(self.memory.of(used))


def _switched(mode: tuple[Hashable, ...], node: fx.Node) -> tuple[Hashable, ...]:
    """Return the mode after a switch: grad mode, then the open regions of inference mode."""
    if "exit" in function_name(node):
        return (mode[0], *(region for region in mode[1:] if region is not node.args[0]))
    if "enter" in function_name(node):
        return (*mode, node)
    return (bool(node.args[0]), *mode[1:])
