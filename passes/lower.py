"""Adjustable operators in formats that torch has no operators for become `qsync::` operators, forward and backward as a pair.

Invariant: every planned precision is present in the lowered graph, or the operator runs elsewhere for a reason in its note. An
operator in a plain format needs no lowering: on converted operands torch's own operator computes, forward and backward, in that format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import Operator, PrecisionGraph
from qsync_fx.nodes import argument_at, arguments, map_arguments
from qsync_fx.ops import Kind
from qsync_fx.passes.casts import Casts, drop_unread_casts
from qsync_fx.passes.lowering import Lowering, Operands
from qsync_fx.precision import FORMATS


@dataclass(frozen=True)
class Lower:
    """
    Attributes:
        lowerings: row name -> how it is lowered.
    """

    lowerings: Mapping[str, Lowering]
    name: str = "lower"

    def __call__(self, graph: PrecisionGraph) -> None:
        casts = Casts(graph)
        for node in graph.nodes:
            if "qsync" in node.meta:
                self._lower(graph, Operator(graph, node), casts)
            casts.passed(node)
        drop_unread_casts(graph)
        graph.module.recompile()

    def _lower(self, graph: PrecisionGraph, operator: Operator, casts: Casts) -> None:
        fmt = operator.precision
        if operator.kind is not Kind.ADJUSTABLE or fmt is None:
            return
        if fmt.plain:
            self._guard(graph, operator)
            return
        assert operator.row is not None
        # Above the streams that casts have taken.
        new = self._emit(graph, operator, 2**16 + operator.node.meta["qsync_stream"])
        if isinstance(new, str):
            _run_elsewhere(graph, operator, new, casts)
        else:
            _replace(graph, operator, new)
            self._tell(graph, Operator(graph, new))

    def _guard(self, graph: PrecisionGraph, operator: Operator) -> None:
        assert operator.row is not None
        lowering = self.lowerings.get(operator.row.name)
        if lowering is None or not graph.context.training:
            return
        with graph.graph.inserting_before(operator.node):
            for new in lowering.plain(operator.node):
                graph.propagate(new)

    def _tell(self, graph: PrecisionGraph, operator: Operator) -> None:
        assert operator.row is not None
        clause = self.lowerings[operator.row.name].computed(operator.node, graph.context.device)
        if clause:
            operator.update(reason=f"{operator.note.reason}; {clause}" if operator.note.reason else clause)

    def _emit(self, graph: PrecisionGraph, operator: Operator, stream: int) -> fx.Node | str:
        assert operator.row is not None
        lowering = self.lowerings.get(operator.row.name)
        found = _operands(operator, stream) if lowering else None
        if lowering is None or found is None:
            return f"{operator.row.name} has no lowering to {operator.precision}"
        with graph.graph.inserting_before(operator.node):
            return lowering.emit(operator.node, found)


def _round() -> Any:
    return torch.ops.qsync.round.default


def _operands(operator: Operator, stream: int) -> Operands | None:
    """Reads what insert_casts has put in front of the operator."""
    row, note = operator.row, operator.note
    assert row is not None and note.precision is not None and note.output is not None
    found: list[tuple[fx.Node, fx.Node, fx.Node | None]] = []
    rounders: list[fx.Node] = []
    given = tuple(arguments(operator.node).values())
    for at in row.scaled:
        operand = argument_at(given, at)
        if not isinstance(operand, fx.Node):
            return None
        if operand.target is torch.ops.qsync.dequantize.default:
            quantized, scale, _ = operand.args
            rounders.append(quantized.args[0])  # type: ignore[union-attr, arg-type]
            found.append((rounders[-1].args[0], quantized, scale))  # type: ignore[arg-type]
        elif operand.target is _round():
            rounders.append(operand)
            found.append((operand.args[0], operand, None))  # type: ignore[arg-type]
        else:
            return None
    seed, rounding = rounders[0].args[1], rounders[0].args[4]
    return Operands((found[0], found[1]), seed, stream, note.precision.name, str(rounding), note.output.dtype)  # type: ignore[arg-type]


def _replace(graph: PrecisionGraph, operator: Operator, new: fx.Node) -> None:
    old = operator.node
    _unround_others(new)
    for key in ("qsync", "custom", "stack_trace", "nn_module_stack", "seq_nr", "from_node"):
        if key in old.meta:
            new.meta[key] = old.meta[key]
    graph.propagate(new)
    old.replace_all_uses_with(new)
    graph.graph.erase_node(old)
    new._rename(f"{old.name}_{operator.precision}")


def _unround_others(new: fx.Node) -> None:
    """A bias goes into the FP32 epilogue as it is, not by way of the output's format."""

    def original(used: fx.Node) -> fx.Node:
        narrowing = used.meta.get("qsync_cast") and used.target is torch.ops.aten.to.dtype
        # An operator's own output cast is no such narrowing: its result is the narrow one.
        narrowing = narrowing and not used.meta.get("qsync_output")
        return used.args[0] if narrowing else used  # type: ignore[return-value]

    new.args = tuple(original(a) if isinstance(a, fx.Node) else a for a in new.args)


def _run_elsewhere(graph: PrecisionGraph, operator: Operator, why: str, casts: Casts) -> None:
    """Gives the operator back its operands, converted to the format that stands in for the one it cannot run in."""
    note, row = operator.note, operator.row
    assert note.precision is not None and row is not None
    elsewhere = FORMATS[note.precision.elsewhere]
    node = operator.node
    dtype = elsewhere.dtype

    def restore(used: fx.Node) -> fx.Node:
        source = used
        if used.target is torch.ops.qsync.dequantize.default:
            source = used.args[0].args[0].args[0]  # type: ignore[union-attr, assignment]
        elif used.target is _round():
            source = used.args[0]  # type: ignore[assignment]
        return casts.shared(node, source, dtype)

    map_arguments(node, lambda at, given: fx.node.map_arg(given, restore) if at in row.operands else given)
    before = graph.value(node).dtype
    graph.propagate(node)
    if graph.value(node).dtype is not before:
        users = list(node.users)
        with graph.graph.inserting_after(node):
            cast = casts.convert(node, before)
        cast.meta["qsync_output"] = True
        for user in users:
            user.replace_input_with(node, cast)
    operator.update(precision=elsewhere, reason=f"{note.reason}; {why}, so it runs in {elsewhere}")
