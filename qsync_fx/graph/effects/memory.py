"""Which values of a graph may share memory, and which nodes write to it.

Invariant: values that share memory share a place. The converse need not hold: what a node does that nobody can look into is taken for
the worst. Places are the storages of fake tensors, which alias as the tensors of a run do, whatever a schema says of it (a `reshape` or
a conversion that changes nothing returns its input).
"""

from __future__ import annotations

import operator as py_operator
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from qsync_fx.graph import meta
from qsync_fx.graph.effects.bodies import operands
from qsync_fx.graph.effects.modes import is_switch
from qsync_fx.graph.effects.writes import writes
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.values import tensors

Places = frozenset[Hashable]


class Memory:
    """The places of every node of a graph, as its values are when this is made.

    Args:
        given: for the body of a higher-order operator, the places of its placeholders outside of it.

    Attributes:
        written: the places that some node of the graph writes to.
    """

    def __init__(self, graph: PrecisionGraph, given: Mapping[fx.Node, Places] | None = None) -> None:
        self._graph = graph
        self._beyond: dict[fx.Node, Places] = dict(given or {})
        self._places: dict[fx.Node, Places] = {}
        for node in graph.nodes:
            self._beyond.setdefault(node, self._inherited(node))
            self._places[node] = self.of(node)
        self.written: Places = frozenset().union(*(self.of(used) for node in graph.nodes for used in may_write(node)))

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
    if node.op not in ("call_function", "call_method") or is_switch(node) or node.target is py_operator.getitem:
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        return writes(node)
    if bodies := meta.bodies(node):
        return [used for body in bodies for used in _written_by(body, node)]
    return node.all_input_nodes


def _written_by(body: PrecisionGraph, node: fx.Node) -> Iterable[fx.Node]:
    """Yields the operands of a higher-order operator that its body writes to."""
    memory = Memory(body)
    for placeholder, operand in operands(node, body):
        if isinstance(operand, fx.Node) and memory.of(placeholder) & memory.written:
            yield operand


def _sizes_are_kept(node: fx.Node) -> bool:
    """Whether a view's value is the one that it was traced with, since its sizes depend on values (`PrecisionGraph.propagate`)."""
    return bool(node.meta.get("unbacked_bindings")) and any(r.alias_info for r in node.target._schema.returns)  # type: ignore[union-attr]


def _storages(value: Any) -> Places:
    return frozenset(_storage(t) for t in tensors(value))


def _storage(tensor: torch.Tensor) -> Hashable:
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        # Sparse tensors have none of their own; nothing writes to a part of one.
        return id(tensor)
