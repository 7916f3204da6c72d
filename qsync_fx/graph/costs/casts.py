"""Which casts a set of states takes, and what they cost: what `insert_casts` will do, foreseen without a graph.

Invariant: there is one cast here for each that the pass inserts. It is charged to the operator that reads it first; that of a result which
is given out in another format, to the operator that made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.algebra import Cost, Work
from qsync_fx.graph.costs.flow import Flow, Site
from qsync_fx.graph.costs.operator import size_in
from qsync_fx.graph.effects.memory import Memory
from qsync_fx.graph.effects.sharing import Sharing
from qsync_fx.graph.effects.writes import in_place
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.notes import Note
from qsync_fx.graph.reads import State
from qsync_fx.graph.values import format_of, is_float
from qsync_fx.precision import Precision

States = Mapping[fx.Node, State]


@dataclass(frozen=True)
class Cast:
    """
    Attributes:
        owner: the operator that it is made for; None for what the graph hands on as it was given.
        wanted: whether it is a conversion that the model itself asks for, which is an operator of its own.
        source: the node whose value is converted.
        before, after: the formats.
        cost: of the conversion or quantizer, and of its gradient.
    """

    owner: fx.Node | None
    source: fx.Node
    before: Precision
    after: Precision
    cost: Cost
    wanted: bool = False


def casts(flow: Flow, states: States) -> list[Cast]:
    """Returns the casts that a graph needs where its operators are in these states, and the model's own that convert anything there."""
    walk = _Walk(flow, states)
    walk.graph(flow.graph, None)
    return list(walk.found.values())


class _Walk:
    def __init__(self, flow: Flow, states: States) -> None:
        self.flow, self.states = flow, states
        self.sites: dict[fx.Node, Site] = {site.node: site for site in flow.sites}
        self.found: dict[Any, Cast] = {}

    def graph(self, graph: PrecisionGraph, memory: Memory | None) -> None:
        sharing = Sharing(graph, memory or self.flow.memory(graph))
        for node in graph.nodes:
            self._visit(graph, node, sharing)
            sharing.passed(node)

    def _visit(self, graph: PrecisionGraph, node: fx.Node, sharing: Sharing) -> None:
        if node.op == "output":
            if graph.parent is None:
                fx.node.map_arg(node.args, lambda used: self._read(graph, None, used, self._own(graph, used), sharing))
            return
        for body in meta.bodies(node):
            self.graph(body, self.flow.memory(body))
        site = self.sites.get(node)
        if site is None or node not in self.states:
            return
        note, state = meta.NOTE[node], self.states[node]
        if note.row is not None and note.row.converts:
            self._wanted(graph, site, state)
            return
        for operand in site.operands:
            fmt = site.reader.read_as(state, operand, graph.value(operand.node))
            self._read(graph, node, operand.node, fmt, sharing)
        self._given_out(graph, site, note, state)

    def _own(self, graph: PrecisionGraph, node: fx.Node) -> Precision | None:
        return format_of(graph.value(node)) if is_float(graph.value(node)) else None

    def format(self, graph: PrecisionGraph, node: fx.Node) -> Precision | None:
        """The format of a node's value in these states."""
        source = self.flow.source(node)
        if source in self.states and is_float(graph.value(node)):
            return self.states[source].output or format_of(graph.value(node))
        return self._own(graph, node)

    def _read(
        self, graph: PrecisionGraph, reader: fx.Node | None, used: fx.Node, fmt: Precision | None, sharing: Sharing
    ) -> None:
        origin = self._origin(graph, used, sharing)
        before = self.format(graph, origin)
        if fmt is None or before is None or fmt is before or (fmt.plain and self.format(graph, used) is fmt):
            return
        if fmt.plain and fmt.dtype is before.dtype:
            return
        key = graph, origin, fmt.name, sharing.epoch(origin)
        if key not in self.found:
            owner = reader
            if owner is None:
                made = self.flow.source(origin)
                owner = made if made in self.sites else None
            self.found[key] = Cast(owner, origin, before, fmt, self._cost(graph, origin, before, fmt))

    def _wanted(self, graph: PrecisionGraph, site: Site, state: State) -> None:
        used = site.operands[0].node
        before, after = self.format(graph, used), state.output
        if before is not None and after is not None and before is not after:
            cost = self._cost(graph, used, before, after)
            self.found[graph, site.node, "wanted"] = Cast(site.node, used, before, after, cost, wanted=True)

    def _given_out(self, graph: PrecisionGraph, site: Site, note: Note, state: State) -> None:
        """An operator that computes in the model's own format and promises another, as a lookup in a table does."""
        if note.row is None or not note.row.output_only or state.output is None or in_place(site.node):
            return
        own = format_of(graph.value(site.node))
        if own is not None and state.output.dtype is not own.dtype:
            cost = self._cost(graph, site.node, own, state.output)
            self.found[graph, site.node, "output"] = Cast(site.node, site.node, own, state.output, cost)

    def _origin(self, graph: PrecisionGraph, node: fx.Node, sharing: Sharing) -> fx.Node:
        """Sees through conversions of the model's own that lose nothing, as casts do."""
        while node.target is torch.ops.aten.to.dtype and is_float(graph.value(node)):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            before, after = graph.value(source), graph.value(node)
            lossless = is_float(before) and torch.promote_types(before.dtype, after.dtype) is after.dtype
            memory = sharing.memory
            places = memory.of(node) | (frozenset() if meta.is_cast(node) else memory.of(source))
            if places & memory.written or not sharing.records_as_here(node):
                break
            if not lossless and not meta.has_purpose(node, meta.Purpose.AUTOCAST):
                break
            node = source
        return node

    def _cost(self, graph: PrecisionGraph, source: fx.Node, before: Precision, after: Precision) -> Cost:
        value = graph.value(source)
        read, written = size_in(value, before), size_in(value, after)
        if not after.plain:
            # A quantizer reads once for the scale and once for the values. The operator differentiates past it.
            return Cost(casts=Work(0, read * (2 if after.scaled else 1) + written))
        moved = Work(0, read + written)
        return Cost(casts=moved, casts_backward=moved if self.flow.needs(source) else Work())
