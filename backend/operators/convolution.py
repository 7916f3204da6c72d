"""`qsync::convolution`: the three convolutions of a layer, output, input gradient and weight gradient; 1-D to 3-D, and transposed.

Why composite: see `qsync::linear`. Why in the carrier: there is no integer convolution in torch that takes weights as they are, and
packing them anew each step costs more than an integer unit gains.

Invariant: no convolution sees anything but values of its format, and neither `x` nor `weight` is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from qsync_fx.backend.operators.carry import carry
from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.products import carrier, combined, round_gradients, scaled, uniform
from qsync_fx.passes.lowering import Lowering, Operands, Role, arguments, dimensions
from qsync_fx.precision import precision


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    xq: Tensor,
    x_scale: Tensor | None,
    wq: Tensor,
    w_scale: Tensor | None,
    seed: Tensor,
    stream: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    fmt: str,
    rounding: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes `aten::convolution` from operands in a format, and the gradients likewise.

    Output: the values of the format are multiplied in its carrier, where they are exact, and summed in FP32: for INT8 exact while
    absolute sums stay below 2**24, so for any 1040 products. The sum is rounded to the carrier (or to `out_dtype`, if that is wider: the
    convolution then runs in FP32), scaled and added to the bias in FP32, and rounded to `out_dtype`.

    Gradients are those of `qsync::linear`: the incoming one is rounded to the format's `gradient` once, or, with scales per channel,
    once for each product with the saved operand's scale multiplied in before; then convolved in the carrier.

    Args:
        x: `[N, C, *size]` or `[C, *size]`, floating point; for autograd only.
        weight: `[O, C / groups, *kernel]`, transposed `[C, O / groups, *kernel]`, floating point; for autograd only.
        bias: `[O]`, floating point, or None.
        xq: `x` in the format, same shape. Its memory format decides that of the output.
        x_scale: FP32, `[]` or `[N, 1, ...]`; None for unscaled formats.
        wq: `weight` in the format, same shape.
        w_scale: FP32, `[]` or one for each output channel: `[O, 1, ...]`, transposed `[1, O, ...]`, which takes groups = 1; None
            for unscaled formats.
        seed: int64, `[1]` or `[]`, of the graph.
        stream: tells operators of one graph apart; at least 0 and below 2**30.
        stride, padding, dilation, transposed, output_padding, groups: those of `aten::convolution`.
        fmt: name of the format.
        rounding: how gradients are rounded to formats that are not plain.
        out_dtype: the output's type.

    Returns:
        `[N, O, *size]` or `[O, *size]`. Gradients have the types of `x`, `weight` and `bias`: with master weights in FP32, FP32.
    """
    geometry = stride, padding, dilation, transposed, output_padding, groups
    found: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, xq, x_scale, wq, w_scale, seed, stream, geometry, fmt, rounding, out_dtype
    )
    return found


def _batched(t: Tensor, ndim: int) -> Tensor:
    return t if t.dim() == ndim else t.unsqueeze(0)


def _per_channel(scale: Tensor | None, ndim: int) -> Tensor | None:
    """Returns a weight's scale so that it broadcasts against the output: `[1, O, 1, ...]`."""
    return scale if scale is None or scale.dim() == 0 else scale.reshape(1, -1, *[1] * (ndim - 2))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        xq: Tensor,
        x_scale: Tensor | None,
        wq: Tensor,
        w_scale: Tensor | None,
        seed: Tensor,
        stream: int,
        geometry: tuple[Any, ...],
        fmt: str,
        rounding: str,
        out_dtype: torch.dtype,
    ) -> Tensor:
        # The weight gradient needs only the weight's shape and the input gradient only the input's, but one call serves both.
        ctx.save_for_backward(xq, x_scale, wq, w_scale, seed)
        ctx.how = stream, geometry, fmt, rounding
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ndim = wq.dim()
        # The product is rounded to the type that it is computed in, so an FP32 output asks for FP32.
        dtype = torch.promote_types(carrier(precision(fmt)), out_dtype)
        product = torch.ops.aten.convolution.default(
            carry(_batched(xq, ndim), dtype), carry(wq, dtype), None, *geometry
        )
        added = None if bias is None else bias.reshape(-1, *[1] * (ndim - 2))
        y = scaled(product, combined(x_scale, _per_channel(w_scale, ndim)), added, out_dtype)
        # A view that a function like this one returns could not be written to in place.
        output: Tensor = y if xq.dim() == ndim else torch.ops.aten._unsafe_view.default(y, y.shape[1:])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        xq, x_scale, wq, w_scale, seed = ctx.saved_tensors
        stream, geometry, fmt, rounding = ctx.how
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        dtype, ndim = carrier(precision(fmt)), wq.dim()
        g = _batched(gradient, ndim)
        # The input gradient contracts the output channels, the weight gradient the batch: the very dimensions that scales vary along.
        folds: dict[Role, Tensor | None] = {}
        if need_x:
            folds["activation"] = None if uniform(w_scale) else _per_channel(w_scale, ndim)
        if need_weight:
            folds["weight"] = None if uniform(x_scale) else x_scale
        rounded = round_gradients(g, folds, seed, stream, fmt, rounding)
        xc, wc = _batched(xq, ndim).to(dtype), wq.to(dtype)

        def products(role: Role, needed: list[bool]) -> tuple[Tensor, Tensor]:
            pair: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward.default(
                rounded[role][0].to(dtype), xc, wc, None, *geometry, [*needed, False]
            )
            return pair[:2]

        grad_x = grad_weight = grad_bias = None
        if need_x and need_weight and rounded["activation"] is rounded["weight"]:
            grad_x, grad_weight = products("activation", [True, True])
        else:
            if need_x:
                grad_x, _ = products("activation", [True, False])
            if need_weight:
                _, grad_weight = products("weight", [False, True])
        if grad_x is not None:
            after = combined(rounded["activation"][1], w_scale if uniform(w_scale) else None)
            grad_x = scaled(grad_x, after, None, x_dtype).view(xq.shape)
        if grad_weight is not None:
            after = combined(rounded["weight"][1], x_scale if uniform(x_scale) else None)
            grad_weight = scaled(grad_weight, after, None, weight_dtype)
        if need_bias:
            grad_bias = g.sum([0, *range(2, ndim)], dtype=torch.float32).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, *[None] * 10


define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, Tensor xq, Tensor? x_scale, Tensor wq, Tensor? w_scale, Tensor seed, int stream, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, "
    "str fmt, str rounding, ScalarType out_dtype) -> Tensor",
    {"CompositeImplicitAutograd": convolution},
)


def _each(value: Any, spatial: int) -> list[Any]:
    """Returns one number a spatial dimension: the schema lets one stand for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * spatial if len(values) == 1 else values


def _emit(node: fx.Node, given: Operands) -> fx.Node | str:
    found, weight = arguments(node), given.operands[1][0]
    spatial = dimensions(weight) - 2
    dilation = _each(found["dilation"], spatial)
    padding = found["padding"]
    if padding == "same":
        # torch pads such that the output is as large as the input: once a side, and one more at the end where that does not come out.
        total = [step * (int(size) - 1) for step, size in zip(dilation, weight.meta["val"].shape[2:], strict=True)]
        if any(size % 2 for size in total):
            return "its padding differs between the two sides, which takes a padded input"
        padding = [size // 2 for size in total]
    elif padding == "valid":
        padding = 0
    geometry = (
        _each(found["stride"], spatial),
        _each(padding, spatial),
        dilation,
        _transposed(node),
        _each(found.get("output_padding", 0), spatial),
        found["groups"],
    )
    (x, xq, x_scale), (w, wq, w_scale) = given.operands
    tensors = x, w, found["bias"], xq, x_scale, wq, w_scale, given.seed
    how = given.fmt, given.rounding, given.out_dtype
    return node.graph.call_function(torch.ops.qsync.convolution.default, (*tensors, given.stream, *geometry, *how))


def _transposed(node: fx.Node) -> bool:
    # Of the generic operators it is an argument, of the others part of the name.
    return bool(arguments(node).get("transposed", "transpose" in str(node.target)))


def _keep(node: fx.Node, role: Role) -> list[int]:
    """A scale per sample, and one per output channel, which grouped transposed convolutions have no dimension of their own for."""
    found = arguments(node)
    if role == "activation":
        return [0] if dimensions(found["input"]) == dimensions(found["weight"]) else []
    if not _transposed(node):
        return [0]
    return [1] if found["groups"] == 1 else []


LOWERINGS = tuple(
    Lowering(name, _emit, _keep)
    for name in (
        *(f"conv{spatial}d" for spatial in (1, 2, 3)),
        *(f"conv_transpose{spatial}d" for spatial in (1, 2, 3)),
        "convolution",
        "_convolution",
    )
)
