"""What each operator costs, as expressions of the graph's symbolic sizes.

Invariant: costs follow from shapes and formats alone, so they hold for every batch size that the graph is compiled for. Sizes are
whole numbers, or sympy expressions where the graph has symbolic sizes. Bytes count each operand and result once, at the width of the
format it has in memory; a quantized operand counts at its quantized width. Saved bytes are what the operator itself keeps for its
backward pass beside parameters as they stand; what the inner compiler recomputes instead is its own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.graph import Operator, PrecisionGraph
from qsync_fx.notes import Cost
from qsync_fx.ops import Kind
from qsync_fx.values import tensors


@dataclass(frozen=True)
class AnnotateCost:
    name: str = "annotate_cost"

    def __call__(self, graph: PrecisionGraph) -> None:
        for operator in graph.own_operators():
            operator.update(cost=_cost(graph, operator))


def _cost(graph: PrecisionGraph, operator: Operator) -> Cost:
    node, row = operator.node, operator.row
    read = sum((_bytes(graph, used) for used in node.all_input_nodes), start=0)
    written = sum((_size(t) for t in tensors(graph.value(node))), start=0)
    flops: Any = 0
    if row is not None and row.flops is not None:
        args = fx.node.map_aggregate(_positional(node), graph.value)
        flops = row.flops(args, graph.value(node))
    saved: Any = 0
    if operator.kind is Kind.ADJUSTABLE and row is not None and graph.context.training:
        operands = [node.args[at] for at in row.operands if at < len(node.args)]
        kept = operands[:2] if row.products else operands[:1]
        saved = sum(
            (_bytes(graph, used) for used in kept if isinstance(used, fx.Node) and used.op == "call_function"), start=0
        )
        if row.output_only:
            saved = 0
    return Cost(expression(flops), expression(read + written), expression(saved))


def _positional(node: fx.Node) -> tuple[Any, ...]:
    """The arguments by position, those given by name and those left out included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.args
    schema = node.target._schema.arguments
    return tuple(
        node.args[at]
        if at < len(node.args)
        else node.kwargs.get(a.name, a.default_value if a.has_default_value() else None)
        for at, a in enumerate(schema)
    )


def _bytes(graph: PrecisionGraph, node: fx.Node) -> Any:
    source = node.args[0] if node.target is torch.ops.qsync.dequantize.default else node
    return sum((_size(t) for t in tensors(graph.value(source))), start=0)


def _size(tensor: torch.Tensor) -> Any:
    return tensor.numel() * tensor.element_size()


def expression(size: Any) -> Any:
    """Returns a size as a whole number, or as a sympy expression where it is symbolic."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
