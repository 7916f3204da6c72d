"""What an operator costs in a state: forward, both gradients, and what it keeps.

Invariant: costs follow from shapes, formats and the operator's row alone, so that they are known of every state, for devices that are not
there, and for every size of a batch. Operands are counted in the format that they are read in; what it takes to convert them is the
cost of casts.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.algebra import Cost, Kept, Size, Work
from qsync_fx.graph.costs.flow import Flow, Site
from qsync_fx.graph.costs.kept import Extra
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.nodes import arguments as arguments_of
from qsync_fx.graph.reads import Operand, State
from qsync_fx.graph.values import expression, format_of, is_float, tensors
from qsync_fx.ops import Flops, Kind
from qsync_fx.precision import Precision


def operator_cost(flow: Flow, site: Site, state: State) -> Cost:
    """Returns what an operator costs in a state, without the casts of its operands."""
    note = meta.NOTE[site.node]
    row, value = note.row, site.graph.value(site.node)
    if flow.is_view(site.node) or (row is not None and row.converts):
        return Cost()  # it shows memory that is there; what a conversion takes, casts know
    result = size_in(value, state.output)
    read = {o: size_in(site.graph.value(o.node), _format(site, state, o)) for o in site.operands}
    if row is not None and row.output_only:
        # Of a large table it reads what it returns.
        read[site.operands[0]] = size_in(value, format_of(value))
    forward = Work(flops_of(site.graph, site.node), sum(read.values(), start=0) + result)
    saved = _saved(flow, site, state)
    multiplied = [o for o in site.operands if row is not None and row.products and o.position not in row.added]
    back = [o for o, need in zip(site.operands, site.needs, strict=True) if need]
    works = {False: Work(), True: Work()}
    for operand in back:
        work = Work(0, result + size_in(site.graph.value(operand.node), format_of(site.graph.value(operand.node))))
        if operand in multiplied:
            # The gradient of a factor is a product of the incoming gradient and of the other factors.
            others = sum((size for o, size in read.items() if o is not operand and o in multiplied), start=0)
            work += Work(_gradient_flops(site, forward.flops, len(multiplied)), others)
        works[is_parameter(flow, operand)] += work
    if back and not multiplied:
        works[False] += Work(0, sum(saved.values()))
    return Cost(forward, works[False], works[True], recomputed=forward if site.repeated else Work(), saved=saved)


def is_parameter(flow: Flow, operand: Operand) -> bool:
    """Whether an operand is a parameter of the model, or a view of one."""
    return isinstance(flow.tensor(operand.node).meta.get("val"), torch.nn.Parameter)


def _gradient_flops(site: Site, forward: Size, factors: int) -> Size:
    """The operations of the gradient of one factor; where all gradients are computed at once, its share of them."""
    row = meta.NOTE[site.node].row
    total = row.gradient_flops if row is not None else None
    return forward if total is None else _counted(site.graph, site.node, total) / sympy.Integer(factors)


def flops_of(graph: PrecisionGraph, node: fx.Node) -> Size:
    """Returns the operations of an operator's forward pass; 0 where they do not matter."""
    row = meta.NOTE[node].row
    return 0 if row is None or row.flops is None else _counted(graph, node, row.flops)


def _counted(graph: PrecisionGraph, node: fx.Node, flops: Flops) -> Size:
    arguments = fx.node.map_aggregate(tuple(arguments_of(node).values()), graph.value)
    return expression(flops(arguments, graph.value(node)))


def _saved(flow: Flow, site: Site, state: State) -> dict[Kept, Size]:
    """What the operator keeps, by value: quantized operands where it is lowered, else what autograd says."""
    note = meta.NOTE[site.node]
    if site.repeated or not any(site.needs):
        return {}
    found: dict[Kept, Size] = {}

    def keep(node: fx.Node, fmt: Precision | None, extent: Any) -> None:
        source = flow.tensor(node)
        own = format_of(site.graph.value(node))
        if source.op == "placeholder" and fmt in (None, own):
            return  # a parameter, or an input: it is there anyway
        found[source.name, str(fmt or "")] = size_in(extent, fmt)

    if note.kind is Kind.ADJUSTABLE and state.precision is not None and not state.precision.plain:
        by_place = {o.place: o for o in site.operands}
        x, w = (by_place[at] for at in note.row.scaled)  # type: ignore[union-attr]
        needs = dict(zip(site.operands, site.needs, strict=True))
        for operand, other in ((x, w), (w, x)):
            if needs[other]:
                keep(operand.node, state.precision, site.graph.value(operand.node))
        return found
    kept = flow.kept(site, state)
    nodes = site.node.all_input_nodes
    formats = {o.node: _format(site, state, o) for o in site.operands}
    for at in kept.operands:
        value = site.graph.value(nodes[at])
        fmt = formats[nodes[at]] if is_float(value) else None
        whole = site.graph.value(flow.tensor(nodes[at]))
        keep(nodes[at], fmt, whole)
    if kept.results:
        found[site.node.name, str(state.output or "")] = sum(
            (size_in(tensors(site.graph.value(site.node))[at], state.output) for at in kept.results), start=0
        )
    for at, extra in enumerate(kept.extras):
        found[site.node.name, f"extra {at}"] = _extra(extra)
    return found


def _extra(extra: Extra) -> Size:
    return expression(extra.numel) * extra.dtype.itemsize


def _format(site: Site, state: State, operand: Operand) -> Precision | None:
    value = site.graph.value(operand.node)
    return site.reader.read_as(state.precision, operand, value) or format_of(value)


def size_in(value: Any, fmt: Precision | None) -> Size:
    """Returns the bytes of a value whose floating-point tensors are in a format."""
    return sum(
        (
            expression(t.numel()) * (fmt.dtype.itemsize if fmt is not None and is_float(t) else t.element_size())
            for t in tensors(value)
        ),
        start=0,
    )
