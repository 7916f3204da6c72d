"""`qsync::grouped`: linear layers on groups of rows, one weight a group, as models of experts compute them.

Invariant: that of `qsync::linear`, whose three products these are for each group. The rows have one scale, or one each; so has the incoming
gradient; each group's weight has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.operators.gradients.derivatives import first_only, link, place
from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.products import combined, incoming, multiplied_in, round_gradients, scaled, uniform
from qsync_fx.passes.lowering import Role
from qsync_fx.precision import Precision, precision


def grouped(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    xq: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    seed: Tensor,
    stream: int,
    fmt: str,
    rounding: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes `x[start:end] @ weight[e]` for each group `e`, and the gradients, as `qsync::linear` does.

    Args:
        x: `[S, K]`, one group after the other; for autograd only.
        weight: `[E, K, N]`; for autograd only.
        offs: `[E]`, the end of each group.
        x_scale: FP32, `[]` or `[S, 1]`; None for unscaled formats.
        w_scale: FP32, `[E, 1, 1]` or `[E, 1, N]`; None for unscaled formats.

    The others are those of `qsync::linear`.
    """
    found, _ = _Grouped.apply(  # type: ignore[no-untyped-call]
        x, weight, offs, xq, x_scale, wq, w_scale, seed, stream, fmt, rounding, out_dtype
    )
    result: Tensor = found
    return result


def _by_row(scale: Tensor | None, offs: Tensor, rows: Tensor) -> Tensor | None:
    """Returns the scale of each row's weight, `[S, 1]` or `[S, N]`."""
    if scale is None:
        return None
    group = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), offs, right=True)
    # Rows beyond the last group are multiplied by nothing.
    return scale.flatten(1)[group.clamp(max=offs.shape[0] - 1)]


def _multiplied(a: Tensor, b: Tensor, offs: Tensor, formats: tuple[Precision, Precision], dtype: torch.dtype) -> Tensor:
    first, second = formats
    found: Tensor = torch.ops.qsync.grouped_products.default(a, b, offs, first.name, second.name, dtype)
    return found


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        xq: Tensor,
        x_scale: Tensor | None,
        wq: Tensor,
        w_scale: Tensor | None,
        seed: Tensor,
        stream: int,
        fmt: str,
        rounding: str,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        need_x, need_weight = ctx.needs_input_grad[:2]
        linked = link()
        ctx.save_for_backward(xq if need_weight else None, x_scale, wq if need_x else None, w_scale, seed, offs, linked)
        ctx.how = stream, rounding
        ctx.fmt, ctx.place = fmt, place(stream)
        ctx.dtypes = x.dtype, weight.dtype
        row = precision(fmt)
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
            grad_weight = scaled(product, combined(scale, x_scale if uniform(x_scale) else None), None, weight_dtype)
        return grad_x, grad_weight, *[None] * 10


define(
    "grouped(Tensor x, Tensor weight, Tensor offs, Tensor xq, Tensor? x_scale, Tensor wq, Tensor? w_scale, Tensor seed, int stream, "
    "str fmt, str rounding, ScalarType out_dtype) -> Tensor",
    {"CompositeImplicitAutograd": grouped},
)
