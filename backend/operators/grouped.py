"""`qsync::grouped`: linear layers on groups of rows with one weight per group (mixture of experts).

Invariant: the three products of `qsync::linear` for each group. The rows share one scale or have
one each, and so do gradient rows; each group's weight has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.operators.once_differentiable import first_only, link, place
from qsync_fx.backend.operators.product_utils import (
    ProductArguments,
    combined,
    define_product,
    incoming,
    multiplied_in,
    round_gradients,
    scaled,
    uniform,
    without_gradients,
)
from qsync_fx.formats import Precision, precision
from qsync_fx.passes.lowering_registry import Role


def grouped(value: ProductArguments, offs: Tensor) -> Tensor:
    """Compute `x[start:end] @ weight[e]` for each group `e`, and the gradients.

    Args:
        value: `x` is `[S, K]`, sorted by group; `weight` `[E, K, N]`; `x_scale` `[]` or `[S, 1]`;
            `w_scale` `[E, 1, 1]` or `[E, 1, N]`.
        offs: `[E]`, the end of each group in the rows.
    """
    matches, _ = _Grouped.apply(*value, offs)  # type: ignore[no-untyped-call]
    result: Tensor = matches
    return result


def _by_row(scale: Tensor | None, offs: Tensor, rows: Tensor) -> Tensor | None:
    """Return the scale of each row's weight, `[S, 1]` or `[S, N]`."""
    if scale is None:
        return None
    group = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), offs, right=True)
    # Rows beyond the last group have no product; any scale will do.
    return scale.flatten(1)[group.clamp(max=offs.shape[0] - 1)]


def _multiplied(
    a: Tensor, b: Tensor, offs: Tensor, formats: tuple[Precision, Precision], dtype: torch.dtype
) -> Tensor:
    first, second = formats
    result: Tensor = torch.ops.qsync.grouped_products.default(
        a, b, offs, first.name, second.name, dtype
    )
    return result


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *shared, offs = arguments
        inputs = ProductArguments(*shared)
        xq, x_scale, wq, w_scale, out_dtype = (
            inputs.xq,
            inputs.x_scale,
            inputs.wq,
            inputs.w_scale,
            inputs.out_dtype,
        )
        need_x, need_weight = ctx.needs_input_grad[:2]
        linked = link()
        ctx.save_for_backward(
            xq if need_weight else None,
            x_scale,
            wq if need_x else None,
            w_scale,
            inputs.seed,
            offs,
            linked,
        )
        ctx.how = inputs.stream, inputs.rounding
        ctx.fmt, ctx.place = inputs.fmt, place(inputs.stream)
        ctx.dtypes = inputs.x.dtype, inputs.weight.dtype
        row = precision(inputs.fmt)
        dtype = torch.promote_types(multiplied_in(row, row, xq.device), out_dtype)
        y = _multiplied(xq, wq, offs, (row, row), dtype)
        return scaled(y, combined(x_scale, _by_row(w_scale, offs, xq)), None, out_dtype), linked

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor, _linked: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed, offs, _ = ctx.saved_tensors
        fmt, (stream, rounding), (x_dtype, weight_dtype) = ctx.fmt, ctx.how, ctx.dtypes
        need_x, need_weight = ctx.needs_input_grad[:2]
        row = precision(fmt)
        narrow = incoming(row, gradient.device)
        dtype = multiplied_in(row, narrow, gradient.device)
        shared = w_scale is None or w_scale.flatten(1).shape[1] == 1
        by_row = _by_row(w_scale, offs, gradient)
        folds: dict[Role, Tensor | None] = {}
        if need_x:
            folds[Role.ACTIVATION] = None if shared else by_row
        if need_weight:
            folds[Role.WEIGHT] = None if uniform(x_scale) else x_scale
        rounded = round_gradients(gradient, folds, seed, stream, fmt, rounding)
        grad_x = grad_weight = None
        if need_x:
            g, scale = rounded[Role.ACTIVATION]
            product = _multiplied(g, wq.mT, offs, (narrow, row), dtype)
            grad_x = scaled(product, combined(scale, by_row if shared else None), None, x_dtype)
        if need_weight:
            g, scale = rounded[Role.WEIGHT]
            product = _multiplied(xq.t(), g, offs, (row, narrow), dtype)
            grad_weight = scaled(
                product, combined(scale, x_scale if uniform(x_scale) else None), None, weight_dtype
            )
        return without_gradients((grad_x, grad_weight), owned=1)


define_product("grouped", grouped, third="Tensor offs", gradients=False)
