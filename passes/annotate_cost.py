"""What each operator costs, as expressions of the graph's symbolic sizes.

Invariant: costs follow from shapes and formats alone, so they hold for every batch size that the graph is compiled for. Sizes are
whole numbers, or sympy expressions where the graph has symbolic sizes. Bytes count each operand and result once, at the width of the
format it has in memory; a quantized operand counts at its quantized width. An operator that gives back its operand's memory, in another
shape perhaps, moves none; where the same operator must copy, it counts. Saved bytes are what the operator itself keeps for its
backward pass beside parameters as they stand; what the inner compiler recomputes instead is its own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.errors import PassError
from qsync_fx.graph import Operator, PrecisionGraph
from qsync_fx.nodes import arguments
from qsync_fx.notes import Cost
from qsync_fx.ops import Kind
from qsync_fx.passes.inplace import writes
from qsync_fx.values import tensors


@dataclass(frozen=True)
class AnnotateCost:
    name: str = "annotate_cost"

    def __call__(self, graph: PrecisionGraph) -> None:
        for operator in graph.own_operators():
            operator.update(cost=_cost(graph, operator))


def _cost(graph: PrecisionGraph, operator: Operator) -> Cost:
    node, row = operator.node, operator.row
    moved: Any = 0
    if operator.kind is Kind.ADJUSTABLE or not _is_view(graph, node):
        moved += sum((_bytes(graph, used) for used in node.all_input_nodes), start=0)
        moved += sum((_size(t) for t in tensors(graph.value(node))), start=0)
    flops: Any = 0
    if row is not None and row.flops is not None:
        args = fx.node.map_aggregate(tuple(arguments(node).values()), graph.value)
        flops = row.flops(args, graph.value(node))
    saved: Any = 0
    if operator.kind is Kind.ADJUSTABLE and row is not None and graph.context.training:
        given = list(arguments(node).values())
        operands = [given[at] for at in row.operands if at < len(given)]
        kept = operands[:2] if row.products else operands[:1]
        saved = sum(
            (_bytes(graph, used) for used in kept if isinstance(used, fx.Node) and used.op == "call_function"), start=0
        )
        if row.output_only:
            saved = 0
    return Cost(expression(flops), expression(moved), expression(saved))


def _is_view(graph: PrecisionGraph, node: fx.Node) -> bool:
    """Whether a node gives back its operands' memory, and writes none of it."""
    if not _may_be_view(node) or not tensors(graph.value(node)):
        return False
    given = {_memory(t) for used in node.all_input_nodes for t in tensors(graph.value(used))}
    try:
        # The value in the graph does not do: that of an operand may have been computed anew since.
        results = [_memory(t) for t in tensors(graph.computed(node))]
    except PassError:
        return False  # its sizes depend on values
    return all(result is not None and result in given for result in results)


def _may_be_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if writes(node):
        return torch.Tag.inplace_view in node.target.tags
    # A schema says which results are views, except for operators that are composed of others.
    return any(result.alias_info is not None for result in node.target._schema.returns) or node.target._can_decompose()


def _memory(tensor: torch.Tensor) -> int | None:
    """Returns what tells a tensor's memory from that of others as long as these live; None for one that is not in one piece."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _bytes(graph: PrecisionGraph, node: fx.Node) -> Any:
    source = node.args[0] if node.target is torch.ops.qsync.dequantize.default else node
    return sum((_size(t) for t in tensors(graph.value(source))), start=0)


def _size(tensor: torch.Tensor) -> Any:
    return tensor.numel() * tensor.element_size()


def expression(size: Any) -> Any:
    """Returns a size as a whole number, or as a sympy expression where it is symbolic."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
