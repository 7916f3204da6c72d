"""Costs of operators and casts: forward, gradients, and bytes saved for backward.

Costs follow from shapes, formats and operator rows, so they are known for every state and batch
size. `casts` predicts each cast of the pass `insert_casts`, charged to its first reader, or for a
cast of a result to the operator that computes it, so the sum is the cost of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from qsync_fx.formats import Precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import Sharing, in_place
from qsync_fx.graph.cost_algebra import Cost, Kept, Size, Work
from qsync_fx.graph.fx_utils import (
    arguments as arguments_of,
    expression,
    format_of,
    is_float,
    tensors,
)
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.operand_formats import Operand, OperandState
from qsync_fx.graph.saved_tensors import Flow, OperandSite
from qsync_fx.ops.spec import Flops, Kind
from qsync_fx.plan.operator_id import OpId


def operator_cost(flow: Flow, site: OperandSite, state: OperandState) -> Cost:
    """Return the cost of an operator in a state, without casts of its operands."""
    note = node_metadata.NOTE[site.node]
    row, value = note.row, site.graph.value(site.node)
    if flow.is_view(site.node) or (row is not None and row.converts):
        return Cost()  # a view moves no bytes, and a conversion counts as a cast
    result = size_in(value, state.output)
    read = {o: size_in(site.graph.value(o.node), _format(site, state, o)) for o in site.operands}
    if row is not None and row.output_only:
        # A lookup reads only the rows that it returns.
        read[site.operands[0]] = size_in(value, format_of(value))
    forward = Work(flops_of(site.graph, site.node), sum(read.values(), start=0) + result)
    saved = _saved(flow, site, state)
    multiplied = [
        o for o in site.operands if row is not None and row.products and o.position not in row.added
    ]
    back = [o for o, need in zip(site.operands, site.needs, strict=True) if need]
    works = {False: Work(), True: Work()}
    for operand in back:
        value = site.graph.value(operand.node)
        work = Work(0, result + size_in(value, format_of(value)))
        if operand in multiplied:
            # The gradient of a factor is a product of the incoming gradient and the other factors.
            others = sum((read[o] for o in multiplied if o is not operand), start=0)
            flops = forward.flops
            if row is not None and row.gradient_flops is not None:
                # They count the gradients of all factors.
                every = _counted(site.graph, site.node, row.gradient_flops)
                flops = every / sympy.Integer(len(multiplied))
            work += Work(flops, others)
        works[is_parameter(flow, operand)] += work
    if back and not multiplied:
        works[False] += Work(0, sum(saved.values()))
    recomputed = forward if site.repeated else Work()
    return Cost(forward, works[False], works[True], recomputed=recomputed, saved=saved)


def is_parameter(flow: Flow, operand: Operand) -> bool:
    """Return whether an operand is a parameter of the model, or a view of one."""
    return isinstance(flow.tensor(operand.node).meta.get("val"), torch.nn.Parameter)


def flops_of(graph: PrecisionGraph, node: fx.Node) -> Size:
    """Return the operations of an operator's forward pass, 0 if they are negligible."""
    row = node_metadata.NOTE[node].row
    if row is None or row.flops is None:
        return 0
    return _counted(graph, node, row.flops)


def _counted(graph: PrecisionGraph, node: fx.Node, flops: Flops) -> Size:
    arguments = fx.node.map_aggregate(tuple(arguments_of(node).values()), graph.value)
    return expression(flops(arguments, graph.value(node)))


def _saved(flow: Flow, site: OperandSite, state: OperandState) -> dict[Kept, Size]:
    """Return the bytes saved by value: quantized operands if lowered, else autograd's answer."""
    note = node_metadata.NOTE[site.node]
    if site.repeated or not any(site.needs):
        return {}
    result: dict[Kept, Size] = {}

    def keep(node: fx.Node, fmt: Precision | None, extent: Any) -> None:
        source = flow.tensor(node)
        owned = format_of(site.graph.value(node))
        if source.op == "placeholder" and fmt in (None, owned):
            return  # parameters and inputs are in memory anyway
        result[source.name, str(fmt or "")] = size_in(extent, fmt)

    if note.kind is Kind.ADJUSTABLE and state.precision is not None and not state.precision.plain:
        by_place = {o.place: o for o in site.operands}
        x, w = (by_place[index] for index in note.row.scaled)  # type: ignore[union-attr]
        needs = dict(zip(site.operands, site.needs, strict=True))
        for operand, other in ((x, w), (w, x)):
            if needs[other]:
                keep(operand.node, state.precision, site.graph.value(operand.node))
        return result
    saved = flow.saved_for(site, state)
    nodes = site.node.all_input_nodes
    floats = [o for o in site.operands if is_float(site.graph.value(o.node))]
    formats = {o.node: _format(site, state, o) for o in floats}
    for index in saved.operands:
        full = site.graph.value(flow.tensor(nodes[index]))
        keep(nodes[index], formats.get(nodes[index]), full)
    if saved.results:
        results = tensors(site.graph.value(site.node))
        sizes = (size_in(results[index], state.output) for index in saved.results)
        result[site.node.name, str(state.output or "")] = sum(sizes, start=0)
    for index, extra in enumerate(saved.extras):
        nbytes = expression(extra.numel) * extra.dtype.itemsize
        result[site.node.name, f"extra {index}"] = nbytes
    return result


def _format(site: OperandSite, state: OperandState, operand: Operand) -> Precision | None:
    value = site.graph.value(operand.node)
    return site.reader.read_as(state.precision, operand, value) or format_of(value)


def size_in(value: Any, fmt: Precision | None) -> Size:
    """Return the bytes of a value whose floating-point tensors are in a format."""
    result: Size = 0
    for t in tensors(value):
        dtype = fmt.dtype if fmt is not None and is_float(t) else t.dtype
        result += expression(t.numel()) * dtype.itemsize
    return result


@dataclass(frozen=True)
class FormatSource:
    """Format of a node's value: the output of `site`, or without one, `fixed` under any plan."""

    site: OperandSite | None
    fixed: Precision | None


@dataclass(frozen=True, eq=False)
class CastSite:
    """A read of a value that may need a cast.

    `used` is the node that is read, `origin` the node that a cast converts. Reads with an equal
    `shared` share one cast per format. An output of the graph has neither reader nor operand.
    """

    graph: PrecisionGraph
    reader: OperandSite | None
    operand: Operand | None
    used: fx.Node
    origin: fx.Node
    used_format: FormatSource
    origin_format: FormatSource
    value: Any
    shared: Hashable

    def wanted(self, precision: Precision | None) -> Precision | None:
        """Return the format that a reader in `precision` reads the value in; None for any."""
        if self.reader is None or self.operand is None:
            return self.used_format.fixed
        return self.reader.reader.read_as(precision, self.operand, self.value)


@dataclass(frozen=True, eq=False)
class FormatChange:
    """A conversion of `origin` that the model requests, or a cast of an operator's result."""

    graph: PrecisionGraph
    reader: OperandSite
    origin: fx.Node
    origin_format: FormatSource
    requested: bool


def places(flow: Flow) -> list[CastSite | FormatChange]:
    """Return all reads and changes of format that may need a cast in some state, in order."""
    return list(_places(flow, flow.graph))


def _places(flow: Flow, graph: PrecisionGraph) -> Iterator[CastSite | FormatChange]:
    sharing = Sharing(graph, flow.memory(graph))

    def format_source(node: fx.Node) -> FormatSource:
        value = graph.value(node)
        if not is_float(value):
            return FormatSource(None, None)
        return FormatSource(flow.by_node.get(flow.source(node)), format_of(value))

    def reads(site: OperandSite | None, operand: Operand | None, used: fx.Node) -> list[CastSite]:
        origin, live, value = sharing.origin(used), format_source(used), graph.value(used)
        if live.fixed is None:
            return []
        key = graph, origin, sharing.epoch(origin)
        return [
            CastSite(graph, site, operand, used, origin, live, format_source(origin), value, key)
        ]

    for node in graph.nodes:
        for body in node_metadata.bodies(node):
            yield from _places(flow, body)
        site, row = flow.by_node.get(node), None
        if site is not None:
            row = node_metadata.NOTE[node].row
        if node.op == "output" and graph.parent is None:
            outputs: list[fx.Node] = []
            fx.node.map_arg(node.args, outputs.append)
            for used in outputs:
                yield from reads(None, None, used)
        elif site is not None and row is not None and row.converts:
            used = site.operands[0].node
            yield FormatChange(graph, site, used, format_source(used), requested=True)
        elif site is not None:
            for operand in site.operands:
                yield from reads(site, operand, operand.node)
            # An operator that computes in the model's format and outputs another one, such as an
            # embedding.
            if row is not None and row.output_only and not in_place(node):
                source = FormatSource(None, format_of(graph.value(node)))
                yield FormatChange(graph, site, node, source, requested=False)
        sharing.passed(node)


States = Mapping[fx.Node, OperandState]


@dataclass(frozen=True)
class CastCost:
    """A cast, with the cost of the conversion or quantizer and of its gradient.

    The owner of a graph input that is returned is None. `wanted`: it is an operator of the model.
    """

    owner: fx.Node | None
    source: fx.Node
    before: Precision
    after: Precision
    cost: Cost
    wanted: bool = False


def casts(flow: Flow, states: States, where: Sequence[CastSite | FormatChange]) -> list[CastCost]:
    """Return the casts at `places` in given states, including the model's effective conversions."""
    result: dict[Any, CastCost] = {}

    def current(live: FormatSource) -> Precision | None:
        if live.site is None or live.site.node not in states:
            return live.fixed
        return states[live.site.node].output or live.fixed

    for place in where:
        reader, precision, output = place.reader, None, None
        if reader is not None:
            if reader.node not in states:
                continue
            precision, output = states[reader.node].precision, states[reader.node].output
        key: Hashable
        if isinstance(place, CastSite):
            before, after = current(place.origin_format), place.wanted(precision)
            needed = needs_cast(before, current(place.used_format), after)
            key, owner, requested = place.shared, reader or place.origin_format.site, False
        else:
            before, after, requested = current(place.origin_format), output, place.requested
            needed = changes_format(before, after, requested)
            key, owner = (reader, requested), reader
        if before is None or after is None or not needed or (key, after.name) in result:
            continue
        value, node = place.graph.value(place.origin), getattr(owner, "node", None)
        sizes = size_in(value, before), size_in(value, after)
        cost = cast_cost(*sizes, after, flow.needs(place.origin))
        result[key, after.name] = CastCost(node, place.origin, before, after, cost, requested)
    return list(result.values())


def needs_cast(before: Precision | None, used: Precision | None, wanted: Precision | None) -> bool:
    """Return whether a value has to be converted for a reader that wants a format; None for any.

    `before` is its format where a cast converts it, `used` behind conversions of the model.
    """
    if wanted is None or before is None or wanted is before:
        return False
    return not (wanted.plain and (used is wanted or wanted.dtype is before.dtype))


def changes_format(before: Precision | None, after: Precision | None, requested: bool) -> bool:
    """Return whether an operator contains a conversion, which the model may have requested."""
    if before is None or after is None or before is after:
        return False
    return requested or before.dtype is not after.dtype


def cast_cost(read: Size, written: Size, after: Precision, differentiated: bool) -> Cost:
    """Return the cost of a conversion or quantizer, given bytes read and written."""
    if after.scaled:
        # A quantizer reads once for the scale and once for the values.
        read *= 2
    moved = Work(0, read + written)
    if after.plain and differentiated:
        return Cost(casts=moved, casts_backward=moved)
    return Cost(casts=moved)  # the gradient of a quantizer is part of the operator


class Costing:
    """Costs of one graph for any plan; results are cached across plans."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._cache: dict[tuple[fx.Node, OperandState], Cost] = {}

    @functools.cached_property
    def places(self) -> list[CastSite | FormatChange]:
        """Reads and changes of format that may need a cast, under any plan."""
        return places(self.flow)

    def cost_without_casts(self, node: fx.Node, state: OperandState) -> Cost:
        """Return the cost of the operator at `node` in a state, without casts."""
        key = node, state
        if key not in self._cache:
            site = self.flow.by_node[node]
            self._cache[key] = operator_cost(self.flow, site, state).renamed(self.flow.sizes)
        return self._cache[key]

    def of(self, states: Mapping[OpId, OperandState]) -> dict[OpId, Cost]:
        """Return the cost of each operator by its id, casts included, in the given states."""
        sites = [site for site in self.flow.sites if site.id in states]
        by_node = {site.node: states[site.id] for site in sites}
        result = {site.id: self.cost_without_casts(site.node, states[site.id]) for site in sites}
        for cast in casts(self.flow, by_node, self.places):
            if cast.owner is not None:
                owner = self.flow.by_node[cast.owner].id
                result[owner] += cast.cost.renamed(self.flow.sizes)
        return result
