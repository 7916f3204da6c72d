"""`qsync::attention`: attention as two products with a softmax between them, where that is faster than torch's fused kernel.

Why composite: AOTAutograd traces into it, the products are torch's own, and Inductor fuses scale and softmax into one pass.

Invariant: which attention that is, `qsync_fx.graph.saved_tensors` says. Operands and result lie in the format that was decided.

Masks of attention that a GPU's fused kernels take.

They read a mask along the keys, and want those beside one another in memory. One that is the same for all keys, as models make it where
nothing is masked at all, is a view with a stride of zero there: torch then computes attention by products in FP32, with masks and weights
of dropout in memory.

Invariant: the values of a mask stay as they are, and so does each dimension along which it is repeated, but for the keys.
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
"""Its place among the arguments."""
aten = torch.ops.aten


def lay_out_masks(graph: PrecisionGraph) -> None:
    """Writes masks anew that lie otherwise, in a graph that has been lowered, on a GPU."""
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
    # Sizes that are symbols may be one, where strides are nothing to a kernel; a mask that is trained has a gradient as it lies.
    if (
        not isinstance(mask, Tensor)
        or mask.requires_grad
        or not all(isinstance(size, int) for size in mask.shape)
    ):
        return False
    return mask.shape[-1] > 1 and mask.stride(-1) != 1


def _laid_out(graph: PrecisionGraph, node: fx.Node, value: fx.Node, mask: Tensor) -> fx.Node:
    """Returns the mask with its keys beside one another."""
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
    f"computed as products, which are faster than torch's fused kernel up to {MOST_TOKENS} tokens"
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
    """Return attention as products.

    Args:
        query, key, value: `[batch, heads, tokens, width]`, BF16 or FP16.
        scale: of the scores; `width ** -0.5` by default.
        order: dimensions of the result from the outermost in memory to the innermost; None for any.
        gradient_order: the same of all three gradients.
    """
    if gradient_order is not None:
        query, key, value = (
            _GradientInOrder.apply(operand, gradient_order)  # type: ignore[no-untyped-call]
            for operand in (query, key, value)
        )
    result = products(query, key, value, scale)
    return result if order is None else in_order(result, order)


class _GradientInOrder(torch.autograd.Function):
    """The identity, whose gradient has its dimensions in an order in memory."""

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
    """Puts products in the place of the attention of a graph that has been lowered, where they are faster.

    What checkpointing computes again stays as it is: it keeps nothing, and its memory is what the checkpoint saves.
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
            # The fused kernel returns a view of `[batch, tokens, heads, width]`, the products do not.
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
    """Return the order in memory of torch's gradients; None if torch has no fused kernel for them."""
    widths = {operand.shape[-1] for operand in operands}
    fused = len(widths) == 1 and all(operand.stride(-1) == 1 for operand in operands)
    return _BY_TOKEN if fused else None


def _trained(graph: PrecisionGraph) -> set[fx.Node]:
    """Returns the nodes that a gradient may flow back to."""
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
