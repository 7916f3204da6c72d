"""Attention rewrites: products instead of torch's fused kernel, and layouts of masks.

`qsync::attention` is two products with a softmax between them, used if that is faster, which
`qsync_fx.graph.saved_tensors.as_products` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from qsync_fx.backend.operators.convert import in_order
from qsync_fx.backend.operators.registration import define
from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import arguments, memory_order
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.saved_tensors import FUSED, MOST_TOKENS, as_products, products

aten = torch.ops.aten


def lay_out_masks(graph: PrecisionGraph) -> None:
    """Make attention masks contiguous along the keys, in a lowered graph on a GPU.

    CUDA's fused kernels require it. A mask that is constant along the keys is a view with stride 0;
    torch then computes attention as FP32 products, with masks and dropout weights materialized.
    Other broadcast dimensions stay broadcast.
    """
    if not _read_so(graph.context.device):
        return
    for node in graph.nodes:
        if node.target is not FUSED:
            continue
        inputs = arguments(node)["attn_mask"]
        if isinstance(inputs, fx.Node) and _strided_along_keys(mask := graph.value(inputs)):
            node.replace_input_with(inputs, _laid_out(graph, node, inputs, mask))
    graph.module.recompile()


def _read_so(device: torch.device) -> bool:
    return device.type == "cuda"


def _strided_along_keys(mask: object) -> bool:
    # A symbolic size may be 1, where strides do not matter. A trained mask has a gradient in its
    # layout.
    if not isinstance(mask, Tensor) or mask.requires_grad:
        return False
    static = all(isinstance(size, int) for size in mask.shape)
    return static and mask.shape[-1] > 1 and mask.stride(-1) != 1


def _laid_out(graph: PrecisionGraph, node: fx.Node, value: fx.Node, mask: Tensor) -> fx.Node:
    """Return a copy of the mask that is contiguous along the keys."""
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.slice.Tensor, (dim, 0, 1), {})
        for dim, stride in enumerate(mask.stride()[:-1])
        if stride == 0 and mask.shape[dim] > 1
    ]
    calls.append((aten.clone.default, (), {"memory_format": torch.contiguous_format}))
    calls.append((aten.expand.default, (list(mask.shape),), {}))
    with graph.graph.inserting_before(node):
        for target, args, kwargs in calls:
            value = graph.graph.call_function(target, (value, *args), kwargs)
            graph.propagate(value)
    return value


_REASON: Final = (
    "computed as separate products, which are faster than torch's fused kernel up to "
    f"{MOST_TOKENS} tokens"
)

_BY_TOKEN: Final = (0, 2, 1, 3)
"""Order in memory of the gradients of torch's fused kernel, `[batch, heads, tokens, width]`."""


class _GradientInOrder(torch.autograd.Function):
    """Identity that lays out its gradient in a given dimension order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Sequence[int]) -> Tensor:
        ctx.order = order
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return in_order(gradient, ctx.order), None


@define(
    "attention(Tensor query, Tensor key, Tensor value, float? scale=None, int[]? order=None, "
    "int[]? gradient_order=None) -> Tensor",
    "CompositeImplicitAutograd",
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    order: Sequence[int] | None = None,
    gradient_order: Sequence[int] | None = None,
) -> Tensor:
    """Compute attention on `[batch, heads, tokens, width]`, with the result and gradients in order.

    Orders are from the outermost dimension in memory to the innermost; None for any.
    """
    if gradient_order is not None:
        query, key, value = (
            _GradientInOrder.apply(operand, gradient_order)  # type: ignore[no-untyped-call]
            for operand in (query, key, value)
        )
    result = products(query, key, value, scale)
    if order is None:
        return result
    return in_order(result, order)


def attend_by_products(graph: PrecisionGraph) -> None:
    """Replace fused attention by faster products in a lowered graph.

    Bodies of activation checkpoints are left alone: they save no tensors, and the memory is the
    checkpoint's.
    """
    context, trained = graph.context, _trained(graph)
    if not context.training:
        return
    for node in graph.nodes:
        note = node_metadata.NOTE.get(node)
        if node.target is not FUSED or note is None:
            continue
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), graph.value)
        need = any(used in trained for used in node.all_input_nodes)
        if not as_products(node.target, args, kwargs, need, context.device, context.options):
            continue
        with graph.graph.inserting_before(node):
            # The fused kernel returns a view of `[batch, tokens, heads, width]`; products do not.
            orders = memory_order(graph.value(node)), _gradient_order(args[:3])
            operands: tuple[Any, ...] = (*node.args[:3], node.kwargs.get("scale"), *orders)
            new = graph.graph.call_function(torch.ops.qsync.attention.default, operands)
        node_metadata.take_over(new, node)
        graph.propagate(new)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        operator = next(item for item in graph.own_operators() if item.node is new)
        operator.update(reason="; ".join(filter(None, (note.reason, _REASON))))
    graph.module.recompile()


def _gradient_order(operands: Sequence[Any]) -> Sequence[int] | None:
    """Return the memory order of torch's gradients; None without a fused kernel for them."""
    widths = {operand.shape[-1] for operand in operands}
    if len(widths) == 1 and all(operand.stride(-1) == 1 for operand in operands):
        return _BY_TOKEN
    return None


def _trained(graph: PrecisionGraph) -> set[fx.Node]:
    """Return the nodes to which a gradient may flow back."""
    result: set[fx.Node] = set()
    for node in graph.nodes:
        leaf = node.op in ("placeholder", "get_attr")
        value = node.meta.get("val")
        requires_grad = leaf and isinstance(value, Tensor) and value.requires_grad
        if requires_grad or not result.isdisjoint(node.all_input_nodes):
            result.add(node)
    return result
