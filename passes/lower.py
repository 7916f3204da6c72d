"""Lowering of adjustable operators to `qsync::` operators, forward and backward as a pair.

Only formats without native torch operators need it. Invariant: every assigned precision occurs in
the lowered graph; operators that cannot run in it got another one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.fx_utils import argument_at, arguments
from qsync_fx.graph.node_metadata import Part, Purpose
from qsync_fx.ops import Kind
from qsync_fx.passes.insert_casts import drop_unread_casts
from qsync_fx.passes.lowering_registry import Lowering, Operands
from qsync_fx.passes.pass_base import Scope
from qsync_fx.rounding import Rounding


@dataclass(frozen=True)
class Lower:
    """Pass that replaces adjustable operators by their lowered form."""

    name: ClassVar[str] = "lower"
    scope: ClassVar[Scope] = Scope.BODY

    lowerings: Mapping[str, Lowering]
    rounding: Rounding = "stochastic"

    def __call__(self, graph: PrecisionGraph) -> None:
        for operator in graph.own_operators():
            self._lower(graph, operator)
        drop_unread_casts(graph)
        node_metadata.charge_all(graph.graph)
        graph.module.recompile()

    def _lower(self, graph: PrecisionGraph, operator: Operator) -> None:
        fmt = operator.precision
        if operator.kind is not Kind.ADJUSTABLE or fmt is None:
            return
        assert operator.row is not None
        lowering = self.lowerings.get(operator.row.name)
        if fmt.plain:
            if lowering is not None and graph.context.training:
                with graph.graph.inserting_before(operator.node):
                    for new in lowering.plain(operator.node):
                        graph.propagate(new)
            return
        assert lowering is not None
        with graph.graph.inserting_before(operator.node):
            new = lowering.emit(operator.node, self._operands(operator))
        replace(graph, operator, new)
        Operator(graph, new).update(computed=lowering.computed(new, graph.context.device))

    def _operands(self, operator: Operator) -> Operands:
        row, note = operator.row, operator.note
        fmt, output, stream = note.precision, note.output, note.stream
        assert row is not None and fmt is not None and output is not None and stream is not None
        inputs = tuple(arguments(operator.node).values())
        (x, seed), (weight, _) = (_rounded(argument_at(inputs, index)) for index in row.scaled)
        return Operands((x, weight), seed, stream, fmt.name, self.rounding, output.dtype)


def _rounded(operand: fx.Node) -> tuple[tuple[fx.Node, fx.Node, fx.Node | None], fx.Node]:
    """Return (original, values, scale or None) of a rounded operand, and its seed."""
    original = node_metadata.cast_source(operand)
    if not node_metadata.is_part(operand, Part.DEQUANTIZE):
        return (original, operand, None), arguments(operand)["seed"]
    values, scale = (arguments(operand)[name] for name in ("q", "scale"))
    return (original, values, scale), arguments(values.args[0])["seed"]


def replace(
    graph: PrecisionGraph, operator: Operator, new: fx.Node, saved: tuple[fx.Node, ...] = ()
) -> None:
    """Replace an operator by its lowered form; bypass casts of its bias, unless `saved`."""
    old = operator.node
    for used in new.all_input_nodes:
        # The output of a RESULT cast is another operator's result, which is narrow by decision.
        is_result = node_metadata.has_purpose(used, Purpose.RESULT)
        if node_metadata.is_part(used, Part.CONVERT) and not is_result and used not in saved:
            new.args = tuple(used.args[0] if item is used else item for item in new.args)
    node_metadata.take_over(new, old)
    graph.propagate(new)
    old.replace_all_uses_with(new)
    graph.graph.erase_node(old)
    new._rename(f"{old.name}_{operator.precision}")
