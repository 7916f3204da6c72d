"""`qsync::linear`: output, input gradient and weight gradient of a linear layer in one format.

The operator is composite: unless one of our kernels is faster, the products are torch's, and
Inductor fuses casts, scales and bias around them. `x` and `weight` are inputs for autograd alone;
the arithmetic uses the quantized tensors, which are also saved for backward (QSync, section IV-B:
an operator is its forward and backward pass).

Invariant: every product multiplies values of its format, and neither `x` nor `weight` is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_fx import rounding as stream_layout
from qsync_fx.backend.operators.gemm import int_mm
from qsync_fx.backend.operators.gemm.dispatch import Dispatcher, MatrixProduct, partner
from qsync_fx.backend.operators.memory_order import in_order
from qsync_fx.backend.operators.once_differentiable import first_only, link, place
from qsync_fx.backend.operators.product_utils import (
    ProductArguments,
    carried,
    combined,
    define_product,
    incoming,
    multiplied_in,
    narrowed,
    result,
    round_gradients,
    scaled,
    summed,
    transposed,
    uniform,
    without_gradients,
)
from qsync_fx.backend.operators.quantize import quantize_transposed
from qsync_fx.formats import Precision, precision
from qsync_fx.passes.lowering_registry import Role


def linear(value: ProductArguments) -> Tensor:
    """Compute `x @ weight.T + bias` from operands in a format, and the gradients likewise.

    Output: INT8 products are summed exactly in INT32 (in FP32 from K = 133,000 on); formats with a
    carrier are multiplied in it, summed in FP32 and rounded to it. Scale and bias are applied in
    FP32, then one rounding to `out_dtype` follows.

    Gradients: the incoming gradient is rounded to the format's `gradient` (BF16 for INT8, scaled
    E5M2 for FP8, TF32 for TF32). It is multiplied by the saved operand in the carrier; the result
    is rounded to the carrier and scaled in FP32. A per-channel scale of the saved operand varies
    along the contracted dimension: it is multiplied into the incoming gradient in FP32 before
    rounding, so that each of the two products has its own rounding. The bias gradient is the FP32
    sum of the unrounded incoming gradient. INT8 gradients (`int8_grad`) are multiplied exactly like
    the output; from 133,000 rows or channels on in the carrier, on the CPU in FP32, since INT32
    sums might overflow. With `gradients` "stochastic" the backward products are computed in FP32,
    and 16-bit gradients and results are rounded stochastically.

    A product by a kernel (`qsync::gemm`; INT8 on the CPU, on CUDA if faster) is not rounded to the
    carrier. Tensor cores require INT8 contiguous along the contracted dimension: the gradient is
    quantized in two layouts, the saved operand is copied.

    Args:
        value: `x` is `[..., K]`, or `[E, M, K]` for a batch of layers such as experts, each with
            its own operands and scales; `weight` `[N, K]` or `[E, N, K]`; `bias` `[N]` or `[E, 1,
            N]`; `x_scale` `[]` or `[..., 1]`, batched `[E, 1, 1]` or `[E, M, 1]`; `w_scale` `[]` or
            `[N, 1]`, batched `[E, 1, 1]` or `[E, N, 1]`.

    Returns:
        `[..., N]` or `[E, M, N]`. Gradients have the dtypes of `x`, `weight` and `bias`.
    """
    matches, _ = _Linear.apply(*value)  # type: ignore[no-untyped-call]
    result: Tensor = matches
    return result


def _rows(t: Tensor, stacked: bool) -> Tensor:
    """Return `[..., K]` as `[M, K]`; batched layers have three dimensions already."""
    if stacked:
        return t
    return t.unsqueeze(0) if t.dim() == 1 else t.flatten(0, -2)


def _per_row(scale: Tensor | None, stacked: bool) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 or stacked else scale.reshape(-1, 1)


def _per_column(scale: Tensor | None) -> Tensor | None:
    return scale if scale is None or scale.dim() == 0 else transposed(scale)


def _uniform(scale: Tensor | None, stacked: bool) -> bool:
    """Return whether each layer has a single scale."""
    if scale is None or not stacked:
        return uniform(scale)
    # Shared scales have size 1, an int; a test of a symbolic size would add a guard.
    rows = scale.shape[1]
    return type(rows) is int and rows == 1


def output(
    rows: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    row: Precision,
    out_dtype: torch.dtype,
    dispatcher: Dispatcher,
) -> Tensor:
    """Return `rows @ wq.T`, `[M, N]`, with scales and bias; plain formats use torch's own layer.

    Operands with a third, leading dimension are batched, here and in the gradients.

    Args:
        rows, wq: `[M, K]` and `[N, K]` in the format `row`.
        x_scale, w_scale: FP32, `[]` or `[M, 1]`, and `[]` or `[1, N]`.
    """
    if row.plain:
        added = None if bias is None else bias.to(row.dtype)
        plain: Tensor
        if wq.dim() == 2:
            plain = torch.ops.aten.linear.default(rows, wq, added)
        else:
            plain = (
                rows @ transposed(wq)
                if added is None
                else torch.baddbmm(added, rows, transposed(wq))
            )
        return plain.to(out_dtype)
    call = MatrixProduct(
        rows,
        wq,
        a_scale=x_scale,
        b_scale=w_scale,
        bias=bias,
        out_dtype=out_dtype,
        row=row,
        transposed=True,
    )
    result = dispatcher.matrix_product(call)
    if result is not None:
        return result
    product = int_mm.product(rows, wq, (row, row)) if dispatcher.integers_pay(call) else None
    if product is None:
        # The product is rounded to its compute dtype, so an FP32 output requires FP32.
        dtype = torch.promote_types(multiplied_in(row, row, rows.device), out_dtype)
        left, x_scale = carried(rows, x_scale, dtype)
        right, w_scale = carried(wq, w_scale, dtype)
        product = left @ transposed(right)
    return scaled(product, combined(x_scale, w_scale), bias, out_dtype)


def input_gradient(
    g: Tensor,
    scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    row: Precision,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
    gradients: str = "nearest",
) -> Tensor:
    """Return `g @ wq`, `[M, K]`, of the rounded gradient, `[M, N]`; scales are single numbers."""
    call = MatrixProduct(
        g, wq, a_scale=scale, b_scale=w_scale, out_dtype=dtype, row=row, b_dtype=partner(g)
    )
    result = dispatcher.matrix_product(call)
    if result is None:
        result = _by_integers(call, dispatcher)
    if result is not None:
        return result
    narrow = summed(multiplied_in(row, incoming(row, g.device), g.device), gradients)
    w, w_scale = carried(wq, w_scale, narrow, again=True)
    g, scale = carried(g, scale, narrow, again=True)
    return scaled(g @ w, combined(scale, w_scale), None, dtype)


def weight_gradient(
    g: Tensor,
    scale: Tensor | None,
    xq: Tensor,
    x_scale: Tensor | None,
    row: Precision,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
    flipped: Tensor | None = None,
    by_columns: bool = False,
    gradients: str = "nearest",
) -> Tensor:
    """Return `g.T @ xq`, `[N, K]`, of the rounded gradient, `[M, N]`, and the activation, `[M, K]`.

    Scales are single numbers. `flipped` is a row-major copy of `g.T`, if there is one.
    `by_columns`: the weight is column-major, so its gradient is too.
    """
    if incoming(row, g.device).kind == "integer" or dispatcher.covers(g.device):
        by_rows = transposed(g) if flipped is None else flipped
        call = MatrixProduct(
            by_rows,
            xq,
            a_scale=scale,
            b_scale=x_scale,
            out_dtype=dtype,
            row=row,
            b_dtype=partner(g),
        )
        result = dispatcher.matrix_product(call)
        if result is None:
            result = _by_integers(call, dispatcher)
        if result is not None:
            return result
    narrow = summed(multiplied_in(row, incoming(row, g.device), g.device), gradients)
    x, x_scale = carried(xq, x_scale, narrow, again=True)
    g, scale = carried(g, scale, narrow, again=True)
    product = transposed(transposed(x) @ g) if by_columns else transposed(g) @ x
    return scaled(product, combined(scale, x_scale), None, dtype)


def _by_integers(call: MatrixProduct, dispatcher: Dispatcher) -> Tensor | None:
    """Return a gradient by torch's integer unit; None if it cannot or should not compute it."""
    rounded = incoming(call.row, call.a.device)
    if rounded.kind != "integer" or not dispatcher.integers_pay(call):
        return None
    product = int_mm.product(call.a, transposed(call.b), (rounded, call.row))
    if product is None:
        return None
    return scaled(product, combined(call.a_scale, call.b_scale), None, call.out_dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = ProductArguments(*arguments)
        xq, x_scale, wq, w_scale, bias = (
            inputs.xq,
            inputs.x_scale,
            inputs.wq,
            inputs.w_scale,
            inputs.bias,
        )
        need_x, need_weight = ctx.needs_input_grad[:2]
        # A frozen weight needs no saved activation, a constant input no saved weight.
        linked = link()
        ctx.save_for_backward(
            xq if need_weight else None,
            x_scale,
            wq if need_x else None,
            w_scale,
            inputs.seed,
            linked,
        )
        ctx.shape = xq.shape
        ctx.how = inputs.stream, inputs.rounding, inputs.gradients
        ctx.fmt, ctx.place, ctx.dispatcher = inputs.fmt, place(inputs.stream), inputs.dispatcher
        ctx.stacked = stacked = wq.dim() == 3
        ctx.by_columns = not wq.is_contiguous() and transposed(wq).is_contiguous()
        # torch returns the gradient of a column-major matrix column-major.
        ctx.x_by_columns = xq.dim() == 2 and not xq.is_contiguous() and xq.t().is_contiguous()
        ctx.dtypes = inputs.x.dtype, inputs.weight.dtype, None if bias is None else bias.dtype
        y = output(
            _rows(xq, stacked),
            _per_row(x_scale, stacked),
            wq,
            _per_column(w_scale),
            bias,
            row=precision(inputs.fmt),
            out_dtype=inputs.out_dtype,
            dispatcher=inputs.dispatcher,
        )
        # A view that an autograd.Function returns could not be modified in place.
        result: Tensor = torch.ops.aten._unsafe_view.default(y, [*xq.shape[:-1], wq.shape[-2]])
        return result, linked

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor, _linked: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed, _ = ctx.saved_tensors
        fmt, (stream, rounding, gradients) = ctx.fmt, ctx.how
        dispatcher: Dispatcher = ctx.dispatcher
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        stacked: bool = ctx.stacked
        row, rows = precision(fmt), _rows(gradient, stacked)
        # Input and weight gradient contract the dimensions along which scales vary: channels and
        # rows.
        folds: dict[Role, Tensor | None] = {}
        if need_x:
            folds[Role.ACTIVATION] = None if _uniform(w_scale, stacked) else _per_column(w_scale)
        if need_weight:
            folds[Role.WEIGHT] = None if _uniform(x_scale, stacked) else _per_row(x_scale, stacked)
        grad_x = grad_weight = grad_bias = None
        rounded: dict[Role, tuple[Tensor, Tensor | None]]
        transposed, factor = None, x_scale if _uniform(x_scale, stacked) else None
        folded = any(fold is not None for fold in folds.values())
        if (
            need_weight
            and not folded
            and dispatcher.reads_transpose(rows, _rows(xq, stacked), factor, weight_dtype, row)
        ):
            g, transposed, scale = quantize_transposed(
                rows, seed, stream + stream_layout.SHARED, row.gradient.name, rounding
            )
            pair: tuple[Tensor, Tensor | None] = g, scale
            rounded = dict.fromkeys(folds, pair)
        else:
            rounded = round_gradients(
                rows, folds, seed, stream, fmt, rounding, [0] if stacked else [], gradients
            )
        owned = seed, stream
        if need_x:
            rounded_g, g_scale = rounded[Role.ACTIVATION]
            to_x = input_gradient(
                rounded_g,
                g_scale,
                wq,
                w_scale if _uniform(w_scale, stacked) else None,
                row=row,
                dtype=summed(x_dtype, gradients),
                dispatcher=dispatcher,
                gradients=gradients,
            )
            grad_x = result(to_x, x_dtype, *owned, Role.ACTIVATION, gradients).view(ctx.shape)
            if ctx.x_by_columns:
                grad_x = in_order(grad_x, (1, 0))
        if need_weight:
            rounded_g, g_scale = rounded[Role.WEIGHT]
            to_weight = weight_gradient(
                rounded_g,
                g_scale,
                _rows(xq, stacked),
                factor,
                row=row,
                dtype=summed(weight_dtype, gradients),
                dispatcher=dispatcher,
                flipped=transposed,
                by_columns=ctx.by_columns,
                gradients=gradients,
            )
            grad_weight = result(to_weight, weight_dtype, *owned, Role.WEIGHT, gradients)
        if need_bias:
            grad_bias = narrowed(
                rows.sum(-2, keepdim=stacked, dtype=torch.float32), bias_dtype, *owned, gradients
            )
        return without_gradients((grad_x, grad_weight, grad_bias))


define_product("linear", linear)
