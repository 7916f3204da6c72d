"""Attention rewrites: products instead of torch's fused kernel, and layouts of masks.

`qsync::attention` is two products with a softmax between them, used if that is faster. It is
composite: AOTAutograd traces into it, and Inductor fuses scale and softmax.
`qsync_fx.graph.saved_tensors.as_products` selects the calls.

CUDA's fused kernels require masks contiguous along the keys. A mask that is constant along the keys
is a view with stride 0; torch then computes attention as FP32 products, with masks and dropout
weights materialized. `lay_out_masks` copies such masks, and leaves other broadcast dimensions
broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from qsync_fx.backend.operators.memory_order import in_order
from qsync_fx.backend.operators.registration import define
from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import memory_order
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.saved_tensors import FUSED, MOST_TOKENS, as_products, products

_MASK = 3
"""Index of the mask among the arguments."""
aten = torch.ops.aten


def lay_out_masks(graph: PrecisionGraph) -> None:
    """Make attention masks contiguous along the keys, in a lowered graph on a GPU."""
    if not _read_so(graph.context.device):
        return
    changed = False
    for node in graph.nodes:
        if node.target is not FUSED:
            continue
        inputs = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
        if isinstance(inputs, fx.Node) and _lies_otherwise(mask := graph.value(inputs)):
            node.replace_input_with(inputs, _laid_out(graph, node, inputs, mask))
            changed = True
    if changed:
        graph.module.recompile()


def _read_so(device: torch.device) -> bool:
    return device.type == "cuda"


def _lies_otherwise(mask: object) -> bool:
    # A symbolic size may be 1, where strides do not matter. A trained mask has a gradient in its
    # layout.
    if (
        not isinstance(mask, Tensor)
        or mask.requires_grad
        or not all(isinstance(size, int) for size in mask.shape)
    ):
        return False
    return mask.shape[-1] > 1 and mask.stride(-1) != 1


def _laid_out(graph: PrecisionGraph, node: fx.Node, value: fx.Node, mask: Tensor) -> fx.Node:
    """Return a copy of the mask that is contiguous along the keys."""
    result = value

    def call(target: object, *args: object, **kwargs: object) -> None:
        nonlocal result
        result = graph.graph.call_function(target, (result, *args), kwargs)  # type: ignore[arg-type]
        graph.propagate(result)

    with graph.graph.inserting_before(node):
        for dim, stride in enumerate(mask.stride()[:-1]):
            if stride == 0 and mask.shape[dim] > 1:
                call(aten.slice.Tensor, dim, 0, 1)
        call(aten.clone.default, memory_format=torch.contiguous_format)
        call(aten.expand.default, list(mask.shape))
    return result


_REASON: Final = (
    "computed as separate products, which are faster than torch's fused kernel up to "
    f"{MOST_TOKENS} tokens"
)


_BY_TOKEN: Final = (0, 2, 1, 3)
"""Order in memory of the gradients of torch's fused kernel, `[batch, heads, tokens, width]`."""


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    order: Sequence[int] | None = None,
    gradient_order: Sequence[int] | None = None,
) -> Tensor:
    """Compute attention as two products with a softmax between them.

    Args:
        query, key, value: `[batch, heads, tokens, width]`, BF16 or FP16.
        scale: of the scores; `width ** -0.5` by default.
        order: dimensions of the result from the outermost in memory to the innermost; None for any.
        gradient_order: dimension order of the three gradients, likewise.
    """
    if gradient_order is not None:
        query, key, value = (
            _GradientInOrder.apply(operand, gradient_order)  # type: ignore[no-untyped-call]
            for operand in (query, key, value)
        )
    result = products(query, key, value, scale)
    return result if order is None else in_order(result, order)


class _GradientInOrder(torch.autograd.Function):
    """Identity that lays out its gradient in a given dimension order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Sequence[int]) -> Tensor:
        ctx.order = order
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return in_order(gradient, ctx.order), None


define(
    "attention(Tensor query, Tensor key, Tensor value, float? scale=None, int[]? order=None, "
    "int[]? gradient_order=None) -> Tensor",
    {"CompositeImplicitAutograd": _attention},
)


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
        operator.update(reason=f"{note.reason}; {_REASON}" if note.reason else _REASON)
    graph.module.recompile()


def _gradient_order(operands: Sequence[Any]) -> Sequence[int] | None:
    """Return the memory order of torch's gradients; None without a fused kernel for them."""
    widths = {operand.shape[-1] for operand in operands}
    fused = len(widths) == 1 and all(operand.stride(-1) == 1 for operand in operands)
    return _BY_TOKEN if fused else None


def _trained(graph: PrecisionGraph) -> set[fx.Node]:
    """Return the nodes to which a gradient may flow back."""
    result: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        leaf = (
            node.op in ("placeholder", "get_attr")
            and isinstance(value, torch.Tensor)
            and value.requires_grad
        )
        if leaf or any(used in result for used in node.all_input_nodes):
            result.add(node)
    return result
