"""Lowering of adjustable operators to `qsync::` operators, forward and backward as a pair.

Only formats without native torch operators need it: on operands converted to a plain format,
torch's own operator computes in that format, forward and backward.

Invariant: every assigned precision occurs in the lowered graph. Operators that cannot run in the
planned precision got another one before (`Lowering.refuses`).
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
from qsync_fx.passes.casting import drop_unread_casts
from qsync_fx.passes.lowering_registry import Lowering, Operands
from qsync_fx.passes.pass_base import Scope
from qsync_fx.rounding import Rounding


@dataclass(frozen=True)
class Lower:
    """Pass that replaces adjustable operators by their lowered form.

    Attributes:
        lowerings: the lowering of each operator, by row name.
        rounding: "stochastic", "nearest" or "floor", for incoming gradients.
    """

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
        if fmt.plain:
            self._guard(graph, operator)
            return
        assert operator.row is not None
        with graph.graph.inserting_before(operator.node):
            new = self.lowerings[operator.row.name].emit(operator.node, self._operands(operator))
        replace(graph, operator, new)
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
        lowering = self.lowerings[operator.row.name]
        operator.update(computed=lowering.computed(operator.node, graph.context.device))

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
    """Replace an operator by its lowered form, and bypass casts of a bias except `saved` ones."""
    old = operator.node
    _unround_others(new, saved)
    node_metadata.take_over(new, old)
    graph.propagate(new)
    old.replace_all_uses_with(new)
    graph.graph.erase_node(old)
    new._rename(f"{old.name}_{operator.precision}")


def _unround_others(new: fx.Node, saved: tuple[fx.Node, ...]) -> None:
    """Bypass narrowing casts of a bias: the FP32 epilogue reads it unrounded."""

    for used in new.all_input_nodes:
        # The output of a RESULT cast is another operator's result, which is narrow by decision.
        if node_metadata.has_purpose(used, Purpose.RESULT) or used in saved:
            continue
        if node_metadata.is_part(used, Part.CONVERT):
            source = used.args[0]
            new.args = tuple(source if argument is used else argument for argument in new.args)
