"""`qsync::convolution`: output, input gradient and weight gradient of 1-D to 3-D convolutions.

The operator is composite like `qsync::linear`. torch has no integer convolution for unpacked
weights, so convolutions without a kernel of ours run in the carrier. An output wider than the
carrier would require FP32; a CPU then sums integers (`qsync::integer_convolution`), in 0.2 to 0.9
of FP32's time.

Invariant: every convolution reads values of its format, and neither `x` nor `weight` is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.operators.conv_gradients import Geometry, convolution_backward, forward
from qsync_fx.backend.operators.gemm import implicit_gemm
from qsync_fx.backend.operators.gemm.dispatch import Dispatcher, partner
from qsync_fx.backend.operators.memory_order import in_order
from qsync_fx.backend.operators.once_differentiable import first_only, link, place
from qsync_fx.backend.operators.product_utils import (
    ProductArguments,
    backward_operand,
    carried,
    carrier,
    combined,
    define_product,
    incoming,
    narrowed,
    result,
    round_gradients,
    scaled,
    summed,
    uniform,
    without_gradients,
)
from qsync_fx.formats import Precision, precision
from qsync_fx.passes.lowering_registry import Role


def convolution(
    value: ProductArguments,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    order: Sequence[int],
) -> Tensor:
    """Compute `aten::convolution` from operands in a format, and the gradients likewise.

    Output: values are multiplied exactly in the format's carrier, and summed in FP32. INT8 sums are
    exact below 2**24, so for any 1040 products. The sum is rounded to the carrier (or to
    `out_dtype` if that is wider: the convolution then runs in FP32, or exactly in INT32 on a CPU
    with an integer unit, if it is neither grouped nor transposed). Scale and bias are applied in
    FP32, then one rounding to `out_dtype` follows.

    Gradients: the incoming gradient is rounded to the format's `gradient` and convolved with the
    saved operands in the carrier. If that format is plain, as for `int8`, the weight is multiplied
    by its scale first and rounded to the carrier, and so is an input with a scale per sample; other
    scales are applied to the result. Otherwise, as for FP8 and `int8_grad`, per-channel scales are
    multiplied into the gradient, which is rounded once per product. torch has no convolution of
    INT8 gradients, so `int8_grad` runs in the carrier like FP8. The bias gradient has the
    resolution of the carrier.

    A product of an ungrouped 2-D convolution (on CUDA also 1-D) by a kernel
    (`qsync::conv2d_product`) is not rounded to the carrier, and its INT8 sums are exact. Its result
    is channels-last, copied if torch's is not. The CPU kernel requires channels-last operands.

    Args:
        value: `x` is `[N, C, *size]` or `[C, *size]`; `weight` `[O, C / groups, *kernel]`,
            transposed `[C, O / groups, *kernel]`; `bias` `[O]`; `x_scale` `[]` or `[N, 1, ...]`;
            `w_scale` `[]` or per output channel `[O, 1, ...]`, transposed `[1, O, ...]` with groups
            = 1.
        stride, padding, dilation, transposed, output_padding, groups: of `aten::convolution`.
        order: dimensions of the result, and of the gradients, from the outermost in memory to the
            innermost.

    Returns:
        `[N, O, *size]` or `[O, *size]`. Gradients have the dtypes of `x`, `weight` and `bias`.
    """
    geometry = stride, padding, _spread(dilation, value.weight), transposed, output_padding, groups
    result, _ = _Convolution.apply(*value, geometry, order)  # type: ignore[no-untyped-call]
    return in_order(result, order)


def _spread(dilation: Sequence[int], weight: Tensor) -> list[int]:
    """Return the dilation, 1 along dimensions with one tap.

    torch 2.13 crashes with a segmentation fault for some such layers in BF16.
    """
    size = weight.shape[2:]
    every = [*dilation] * (len(size) if len(dilation) == 1 else 1)
    return [1 if taps == 1 else step for step, taps in zip(every, size, strict=True)]


def _batched(t: Tensor, ndim: int) -> Tensor:
    return t if t.dim() == ndim else t.unsqueeze(0)


def _per_channel(scale: Tensor | None, ndim: int) -> Tensor | None:
    """Return a weight's scale in the shape that broadcasts against the output: `[1, O, 1, ...]`."""
    return scale if scale is None or scale.dim() == 0 else scale.reshape(1, -1, *[1] * (ndim - 2))


_Rounded = tuple[Tensor, Tensor | None]


def output(
    xq: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    row: Precision,
    out_dtype: torch.dtype,
    dispatcher: Dispatcher,
) -> Tensor:
    """Return the convolution of a batch, with scales and bias; plain formats use torch's own layer.

    `row` is the layer's format, `w_scale` is `[]` or `[1, O, 1, ...]`.
    """
    if row.plain:
        plain_bias = None if bias is None else bias.to(row.dtype)
        return forward(xq, wq, plain_bias, geometry).to(out_dtype)
    result = dispatcher.convolution_product(
        xq,
        wq,
        a_scale=x_scale,
        b_scale=w_scale,
        bias=bias,
        like=wq,
        geometry=geometry,
        operation="fprop",
        out_dtype=out_dtype,
        row=row,
    )
    if result is not None:
        return result
    wide = out_dtype.itemsize > carrier(row, xq.device).itemsize
    product = implicit_gemm.sums(xq, wq, geometry, row) if wide else None
    if product is None:
        # The product is rounded to its compute dtype, so an FP32 output requires FP32.
        dtype = torch.promote_types(carrier(row, xq.device), out_dtype)
        x, x_scale = carried(xq, x_scale, dtype)
        w, w_scale = carried(wq, w_scale, dtype)
        product = forward(x, w, None, geometry)
    added = None if bias is None else bias.reshape(-1, *[1] * (wq.dim() - 2))
    return scaled(product, combined(x_scale, w_scale), added, out_dtype)


def input_gradient(
    gradient: _Rounded,
    saved: tuple[Tensor, Tensor],
    factor: Tensor | None,
    geometry: Geometry,
    row: Precision,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
) -> Tensor | None:
    """Return the input gradient of a batch by a kernel; None if there is none.

    `gradient` is rounded; `saved` is (input, weight); `factor` is the weight's scale.
    """
    (g, scale), (xq, wq) = gradient, saved
    return dispatcher.convolution_product(
        g,
        wq,
        a_scale=scale,
        b_scale=factor,
        bias=None,
        like=xq,
        geometry=geometry,
        operation="dgrad",
        out_dtype=dtype,
        row=row,
        b_dtype=partner(g),
    )


def weight_gradient(
    gradient: _Rounded,
    saved: tuple[Tensor, Tensor],
    factor: Tensor | None,
    geometry: Geometry,
    row: Precision,
    dtype: torch.dtype,
    dispatcher: Dispatcher,
) -> Tensor | None:
    """Return the weight gradient by a kernel; None if there is none. See `input_gradient`."""
    (g, scale), (xq, wq) = gradient, saved
    return dispatcher.convolution_product(
        g,
        xq,
        a_scale=scale,
        b_scale=factor,
        bias=None,
        like=wq,
        geometry=geometry,
        operation="wgrad",
        out_dtype=dtype,
        row=row,
        b_dtype=partner(g),
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *shared, geometry, order = arguments
        inputs = ProductArguments(*shared)
        xq, x_scale, wq, w_scale, bias = (
            inputs.xq,
            inputs.x_scale,
            inputs.wq,
            inputs.w_scale,
            inputs.bias,
        )
        # Each gradient needs only the shape of its own operand, but one call computes both.
        linked = link()
        ctx.save_for_backward(xq, x_scale, wq, w_scale, inputs.seed, linked)
        ctx.how = inputs.stream, geometry, inputs.rounding, inputs.gradients
        ctx.fmt, ctx.place, ctx.dispatcher = inputs.fmt, place(inputs.stream), inputs.dispatcher
        ctx.dtypes = inputs.x.dtype, inputs.weight.dtype, None if bias is None else bias.dtype
        ndim = wq.dim()
        ctx.order = order if len(order) == ndim else [0, *(dim + 1 for dim in order)]
        y = output(
            _batched(xq, ndim),
            x_scale,
            wq,
            _per_channel(w_scale, ndim),
            bias,
            geometry=geometry,
            row=precision(inputs.fmt),
            out_dtype=inputs.out_dtype,
            dispatcher=inputs.dispatcher,
        )
        # A view that an autograd.Function returns could not be modified in place.
        result: Tensor = (
            y if xq.dim() == ndim else torch.ops.aten._unsafe_view.default(y, y.shape[1:])
        )
        return result, linked

    @staticmethod
    @first_only
    def backward(ctx: Any, gradient: Tensor, _linked: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed, _ = ctx.saved_tensors
        fmt, (stream, geometry, rounding, gradients) = ctx.fmt, ctx.how
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        row, ndim = precision(fmt), wq.dim()
        dtype, g = summed(carrier(row, xq.device), gradients), _batched(gradient, ndim)
        # A scale applied to the weight saves a pass over the input gradient.
        wc, w_left = backward_operand(wq, w_scale, row, True, gradients)
        xc, x_left = backward_operand(_batched(xq, ndim), x_scale, row, False, gradients)
        # Input and weight gradient contract the dimensions along which scales vary: channels and
        # batch.
        folds: dict[Role, Tensor | None] = {}
        if need_x:
            folds[Role.ACTIVATION] = None if uniform(w_left) else _per_channel(w_left, ndim)
        if need_weight:
            folds[Role.WEIGHT] = None if uniform(x_left) else x_left
        rounded = round_gradients(g, folds, seed, stream, fmt, rounding, gradients=gradients)
        factors = w_left if uniform(w_left) else None, x_left if uniform(x_left) else None
        saved, dispatcher = (xc, wc), ctx.dispatcher
        grad_x = grad_weight = grad_bias = None
        if need_x:
            grad_x = input_gradient(
                rounded[Role.ACTIVATION],
                saved,
                factors[0],
                geometry=geometry,
                row=row,
                dtype=summed(x_dtype, gradients),
                dispatcher=dispatcher,
            )
        if need_weight:
            grad_weight = weight_gradient(
                rounded[Role.WEIGHT],
                saved,
                factors[1],
                geometry=geometry,
                row=row,
                dtype=summed(weight_dtype, gradients),
                dispatcher=dispatcher,
            )
        missing = [need_x and grad_x is None, need_weight and grad_weight is None]
        # A separate sum would extend the life of the gradient to the end of the step, where all
        # layers sum.
        own_bias = (
            need_bias
            and missing[1]
            and incoming(row, g.device).plain
            and rounded[Role.WEIGHT][1] is None
        )

        def products(role: Role, needed: list[bool]) -> tuple[Tensor | None, ...]:
            """Return gradients of input, weight and bias, and the scales left for the first two."""
            incoming_g, left = carried(*rounded[role], dtype, again=True)
            (x, x_factor), (w, w_factor) = (
                carried(q, factor, dtype, again=True)
                for q, factor in ((xc, factors[1]), (wc, factors[0]))
            )
            computed = convolution_backward(incoming_g, x, w, [g.shape[1]], geometry, needed)
            return *computed, combined(left, w_factor), combined(left, x_factor)

        to_x = to_weight = x_rest = w_rest = None
        if all(missing) and rounded[Role.ACTIVATION] is rounded[Role.WEIGHT]:
            to_x, to_weight, grad_bias, x_rest, w_rest = products(
                Role.ACTIVATION, [True, True, own_bias]
            )
        else:
            if missing[0]:
                to_x, _, _, x_rest, _ = products(Role.ACTIVATION, [True, False, False])
            if missing[1]:
                _, to_weight, grad_bias, _, w_rest = products(Role.WEIGHT, [False, True, own_bias])
        if to_x is not None:
            grad_x = scaled(to_x, x_rest, None, summed(x_dtype, gradients))
        if to_weight is not None:
            grad_weight = scaled(to_weight, w_rest, None, summed(weight_dtype, gradients))
        owned = seed, stream
        if grad_x is not None:
            grad_x = in_order(
                result(grad_x, x_dtype, *owned, Role.ACTIVATION, gradients), ctx.order
            ).view(xq.shape)
        if grad_weight is not None:
            grad_weight = in_order(
                result(grad_weight, weight_dtype, *owned, Role.WEIGHT, gradients), ctx.order
            )
        if need_bias:
            if grad_bias is None or not own_bias:
                grad_bias = g.sum([0, *range(2, ndim)], dtype=torch.float32)
            grad_bias = narrowed(grad_bias, bias_dtype, *owned, gradients)
        return without_gradients((grad_x, grad_weight, grad_bias), owned=2)


define_product(
    "convolution",
    convolution,
    owned="SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "int[] order",
)
