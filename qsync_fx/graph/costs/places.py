"""Where casts may stand, whatever the plan: what each operator reads, what a cast would convert for it, and who else would share it.

Invariant: read once from a graph as the model wrote it. Which of these casts there are follows from states alone (`casts`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.costs.flow import Flow, Site
from qsync_fx.graph.effects.sharing import Sharing
from qsync_fx.graph.effects.writes import in_place
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.reads import Operand
from qsync_fx.graph.values import format_of, is_float
from qsync_fx.precision import Precision


@dataclass(frozen=True)
class Held:
    """The format of a node's value: that of an operator's result, or what the model says.

    Attributes:
        site: the operator; None where it is `own` whatever the plan.
        own: the format in the model; None for what is no floating-point tensor.
    """

    site: Site | None
    own: Precision | None


@dataclass(frozen=True, eq=False)
class Place:
    """A reading of a value, for which it may be converted.

    Attributes:
        graph: the graph, or body, that reads.
        reader: the operator; None for what the graph returns.
        operand: what it reads, as it does; None for what the graph returns.
        used, origin: the node that is read, and the one that a cast would convert, with the formats of their values.
        value: that of `used`.
        shared: equal for readings that share one cast a format.
    """

    graph: PrecisionGraph
    reader: Site | None
    operand: Operand | None
    used: fx.Node
    origin: fx.Node
    used_held: Held
    origin_held: Held
    value: Any
    shared: Hashable

    def wanted(self, precision: Precision | None) -> Precision | None:
        """Returns the format that a reader in `precision` reads it in; None for whichever it has."""
        if self.reader is None or self.operand is None:
            return self.used_held.own
        return self.reader.reader.read_as(precision, self.operand, self.value)


@dataclass(frozen=True, eq=False)
class Change:
    """A change of format that is an operator's own: a conversion of the model's, or a result that is given out in another format.

    Attributes:
        graph, site: the operator, where it stands.
        source: the node whose value changes, with the format that it has before.
        wanted: whether the model itself asks for it.
    """

    graph: PrecisionGraph
    site: Site
    source: fx.Node
    held: Held
    wanted: bool


def places(flow: Flow) -> list[Place | Change]:
    """Returns all that may need a cast in a graph, in the order in which it runs."""
    walk = _Walk(flow)
    walk.graph(flow.graph)
    return walk.found


class _Walk:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.found: list[Place | Change] = []

    def graph(self, graph: PrecisionGraph) -> None:
        sharing = Sharing(graph, self.flow.memory(graph))
        for node in graph.nodes:
            self._visit(graph, node, sharing)
            sharing.passed(node)

    def _visit(self, graph: PrecisionGraph, node: fx.Node, sharing: Sharing) -> None:
        if node.op == "output":
            if graph.parent is None:
                fx.node.map_arg(node.args, lambda used: self._read(graph, None, None, used, sharing))
            return
        for body in meta.bodies(node):
            self.graph(body)
        site = self.flow.by_node.get(node)
        if site is None:
            return
        row = meta.NOTE[node].row
        if row is not None and row.converts:
            used = site.operands[0].node
            self.found.append(Change(graph, site, used, self._held(graph, used), wanted=True))
            return
        for operand in site.operands:
            self._read(graph, site, operand, operand.node, sharing)
        # An operator that computes in the model's own format and promises another, as a lookup in a table does.
        if row is not None and row.output_only and not in_place(node):
            self.found.append(Change(graph, site, node, Held(None, format_of(graph.value(node))), wanted=False))

    def _read(
        self, graph: PrecisionGraph, site: Site | None, operand: Operand | None, used: fx.Node, sharing: Sharing
    ) -> None:
        origin = self._origin(graph, used, sharing)
        held = self._held(graph, used)
        if held.own is None:
            return
        key = graph, origin, sharing.epoch(origin)
        before = self._held(graph, origin)
        self.found.append(Place(graph, site, operand, used, origin, held, before, graph.value(used), key))

    def _held(self, graph: PrecisionGraph, node: fx.Node) -> Held:
        value = graph.value(node)
        if not is_float(value):
            return Held(None, None)
        return Held(self.flow.by_node.get(self.flow.source(node)), format_of(value))

    def _origin(self, graph: PrecisionGraph, node: fx.Node, sharing: Sharing) -> fx.Node:
        """Sees through conversions of the model's own that lose nothing, as casts do."""
        while node.target is torch.ops.aten.to.dtype and is_float(graph.value(node)):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            before, after = graph.value(source), graph.value(node)
            lossless = is_float(before) and torch.promote_types(before.dtype, after.dtype) is after.dtype
            memory = sharing.memory
            seen = memory.of(node) | (frozenset() if meta.is_cast(node) else memory.of(source))
            if seen & memory.written or not sharing.records_as_here(node):
                break
            if not lossless and not meta.has_purpose(node, meta.Purpose.AUTOCAST):
                break
            node = source
        return node
