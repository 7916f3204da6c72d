"""Convolutions with explicit padding, for sizes at which oneDNN computes weight gradients wrongly.

If the kernel is longer than the data along a dimension, or a tap of it meets padding alone, oneDNN
leaves parts of the weight gradient unwritten, or writes beyond it (docs/known-issues.md). Input that
contains its padding has the same gradient; it is never shorter than the kernel, and every tap meets
a value of it.

Invariant: whether a dimension is padded follows from sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from qsync_fx.backend.operators.gradients.live_taps import Geometry, least_sizes
from qsync_fx.backend.operators.library import define


def needs_padding(weight: Tensor, x: Tensor, geometry: Geometry) -> bool:
    """Return whether oneDNN may compute this convolution's weight gradient wrongly.

    Conditions on symbolic sizes become guards. In FP32 only 3-D convolutions are affected.
    """
    if x.device.type != "cpu" or (weight.dtype.itemsize >= 4 and weight.dim() < 5):
        return False
    return any(unsafe_dimensions(weight.shape[2:], x.shape[2 - weight.dim() :], geometry))


def unsafe_dimensions(kernel: Sequence[int], size: Sequence[int], geometry: Geometry) -> list[bool]:
    """Return for each spatial dimension whether it has to be padded.

    Args:
        kernel: spatial size of the weight.
        size: spatial size of the convolution's input.
        geometry: of the convolution; every dimension is padded if it is symbolic.
    """
    stride, padding, dilation, transposed, output_padding, groups = geometry
    numbers = [*kernel, *stride, *padding, *dilation, *output_padding]
    if not all(isinstance(number, int) for number in numbers):
        return [True] * len(kernel)
    tap_sizes = least_sizes(kernel, geometry)
    result = []
    each = zip(size, kernel, stride, padding, dilation, strict=True)
    for index, (n, k, s, p, d) in enumerate(each):
        extent = d * (k - 1) + 1
        # The padded side of a transposed convolution is its output.
        data = (n - 1) * s - 2 * p + extent + output_padding[index] if transposed else n
        # Depthwise 3-D gradients are wrong, in FP32 too, unless the data is longer by the stride.
        spare = s - 1 if len(kernel) == 3 and groups != 1 else 0
        conditions = data >= extent + spare, *(n >= least for least in tap_sizes[index])
        safe = p == 0 or all(guard_or_false(condition) for condition in conditions)
        result.append(not safe)
    return result


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    geometry: Geometry,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, None for those that are not needed.

    Args:
        gradient: of the output, `[N, O, *size']`.
        x: `[N, C, *size]`.
        weight: `[O, C / groups, *kernel]`, transposed `[C, O / groups, *kernel]`.
        bias_sizes: shape of the bias; None if there is none.
        geometry: of the convolution.
        needed: whether the gradient of input, weight and bias is needed.
    """
    backward = torch.ops.aten.convolution_backward.default
    to_x: Tensor | None
    to_weight: Tensor | None
    to_bias: Tensor | None
    if not any(needed[1:]) or not needs_padding(weight, x, geometry):
        to_x, to_weight, to_bias = backward(gradient, x, weight, bias_sizes, *geometry, needed)
        return to_x, to_weight, to_bias
    to_x = None
    if needed[0]:
        to_x = backward(gradient, x, weight, None, *geometry, [True, False, False])[0]
    sides, padded = _explicit(weight, x, geometry)
    # The padded side of a transposed convolution is its output.
    if geometry[3]:
        gradient = F.pad(gradient, sides)
    else:
        x = F.pad(x, sides)
    only = [False, *needed[1:]]
    _, to_weight, to_bias = backward(gradient, x, weight, bias_sizes, *padded, only)
    return to_x, to_weight, to_bias


def _explicit(weight: Tensor, x: Tensor, geometry: Geometry) -> tuple[list[int], Geometry]:
    """Return the amounts for `F.pad`, and the geometry with the padding that is left."""
    padding = geometry[1]
    unsafe = unsafe_dimensions(weight.shape[2:], x.shape[2:], geometry)
    amounts = [p if pad else 0 for p, pad in zip(padding, unsafe, strict=True)]
    remaining = [0 if pad else p for p, pad in zip(padding, unsafe, strict=True)]
    dilation, transposed, output_padding, groups = geometry[2:]
    sides = [amount for amount in reversed(amounts) for _ in range(2)]
    return sides, (geometry[0], remaining, dilation, transposed, output_padding, groups)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the output of a convolution.

    In BF16 oneDNN computes grouped 3-D ones wrongly, too, if a group has one input channel, the
    input is channels-last and the kernel is longer than the data.
    """
    grouped = weight.dim() == 5 and weight.shape[1] == 1 and geometry[5] != 1 and not geometry[3]
    if grouped and needs_padding(weight, x, geometry):
        sides, geometry = _explicit(weight, x, geometry)
        x = F.pad(x, sides)
    result: Tensor = torch.ops.aten.convolution.default(x, weight, bias, *geometry)
    return result


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        return forward(x, weight, bias, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.geometry = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_sizes = None if bias is None else list(bias.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        result = convolution_backward(gradient, x, weight, ctx.bias_sizes, ctx.geometry, needed)
        return (*result, None)


def _padded_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    batched = input.dim() == weight.dim()
    x = input if batched else input.unsqueeze(0)
    result: Tensor = _Convolution.apply(x, weight, bias, rest)  # type: ignore[no-untyped-call]
    return result if batched else result.squeeze(0)


define(
    "padded_convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, "
    "SymInt groups) -> Tensor",
    {"CompositeImplicitAutograd": _padded_convolution},
)
