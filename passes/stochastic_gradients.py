"""Stochastic rounding of 16-bit gradients: the option "gradient_rounding".

Torch rounds BF16 and FP16 results to nearest, so averaging does not remove the error. This pass
leaves the forward pass unchanged, and costs, which were annotated before, do not include it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from qsync_fx.devices.format_support import row_on
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.fx_utils import argument_at, arguments, is_float
from qsync_fx.graph.node_metadata import Part
from qsync_fx.ops import Kind
from qsync_fx.passes.insert_casts import drop_unread_casts, seed_node
from qsync_fx.passes.lower import replace
from qsync_fx.passes.lowering_registry import Lowering, Operands
from qsync_fx.passes.pass_base import Scope
from qsync_fx.rounding import GRADIENTS, RESULT, RandomStreams


@dataclass(frozen=True)
class StochasticGradients:
    """Pass that makes products and inserted casts round gradients stochastically."""

    name: ClassVar[str] = "stochastic_gradients"
    scope: ClassVar[Scope] = Scope.MODEL

    lowerings: Mapping[str, Lowering]

    def __call__(self, graph: PrecisionGraph) -> None:
        _Rewriter(graph, self.lowerings, RandomStreams(GRADIENTS, RESULT)).run()


@dataclass(frozen=True)
class _Rewriter:
    graph: PrecisionGraph
    lowerings: Mapping[str, Lowering]
    streams: RandomStreams

    def run(self) -> None:
        for node in self.graph.nodes:
            for body in node_metadata.bodies(node):
                _Rewriter(body, self.lowerings, self.streams).run()
            if node_metadata.is_part(node, Part.CONVERT):
                self._cast(node)
            elif node in node_metadata.NOTE:
                self._operator(Operator(self.graph, node))
        drop_unread_casts(self.graph)
        node_metadata.charge_all(self.graph.graph)
        self.graph.module.recompile()

    def _cast(self, node: fx.Node) -> None:
        """Make a widening conversion round its gradient, which it narrows."""
        source, dtype = node.args
        assert isinstance(source, fx.Node) and isinstance(dtype, torch.dtype)
        value = self.graph.value(source)
        if is_float(value) and value.dtype.itemsize == 2 and dtype.itemsize > 2:
            node.target = torch.ops.qsync.widen.default
            stream = self.streams.take()
            node.args = source, seed_node(self.graph, "stochastic"), stream, dtype
            node_metadata.CAST[node] = dataclasses.replace(node_metadata.CAST[node], stream=stream)

    def _operator(self, operator: Operator) -> None:
        fmt, row = operator.precision, operator.row
        if operator.kind is not Kind.ADJUSTABLE or fmt is None or row is None or not row.products:
            return
        node = operator.node
        if not fmt.plain:
            existing = row_on(self.graph.context.device, fmt)
            if "gradients" in arguments(node):
                self._ask(node)
            elif 16 in (existing.gradient.bits, existing.carrier.bits):
                self._say(operator, f"{node.target} has no variant with stochastic rounding")
        elif fmt.bits == 16 and (why := self._lower(operator)):
            self._say(operator, why)

    def _ask(self, node: fx.Node) -> None:
        """Make a lowered operator round gradients stochastically, with a random seed."""
        index = list(arguments(node)).index("seed")
        node.update_arg(index, seed_node(self.graph, "stochastic"))
        node.update_kwarg("gradients", "stochastic")

    def _say(self, operator: Operator, why: str) -> None:
        clause = f"its gradients are rounded to the nearest value, because {why}"
        operator.update(reason=f"{operator.note.reason}; {clause}")

    def _lower(self, operator: Operator) -> str:
        """Replace an operator that torch computes by a lowered one; return why not, or ""."""
        node, row, fmt = operator.node, operator.row, operator.precision
        assert row is not None and fmt is not None
        why = operator.refused if row.scaled else f"{row.name} has no lowering"
        if why is not None:
            return why
        inputs = tuple(arguments(node).values())
        used = [argument_at(inputs, index) for index in row.scaled]
        if not all(self.graph.value(item).dtype is fmt.dtype for item in used):
            return "its operands have different dtypes"
        operands = [(_original(item), item, None) for item in used]
        stream = self.streams.take()
        prepared = Operands(
            (operands[0], operands[1]),
            seed=seed_node(self.graph, "stochastic"),
            stream=stream,
            fmt=fmt.name,
            rounding="stochastic",
            out_dtype=self.graph.value(node).dtype,
        )
        with self.graph.graph.inserting_before(node):
            new = self.lowerings[row.name].emit(node, prepared)
        if "gradients" not in arguments(new):
            self.graph.graph.erase_node(new)
            return f"{new.target} has no variant with stochastic rounding"
        self._ask(new)
        operator.update(stream=stream)
        replace(self.graph, operator, new, saved=tuple(used))
        return ""


def _original(node: fx.Node) -> fx.Node:
    """Return the source of a converted operand: its gradient needs no rounding."""
    if node_metadata.is_part(node, Part.CONVERT):
        return node_metadata.cast_source(node)
    return node
