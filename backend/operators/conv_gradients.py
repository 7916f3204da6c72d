"""`qsync::padded_convolution`: convolutions whose gradients oneDNN computes wrongly.

If the kernel is longer than the data along a dimension, or one of its taps meets only padding,
oneDNN leaves parts of the weight gradient unwritten, or writes beyond it (docs/known-issues.md).
The operator writes the padding into the input of such convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from qsync_fx.backend.operators.products_in_fp32 import called
from qsync_fx.backend.operators.registration import define

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]
"""`aten::convolution`: stride, padding, dilation, transposed, output_padding, groups."""


def places(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Return the number of window positions along a dimension of the input: the output size."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def least_sizes(kernel: Sequence[int], geometry: Geometry) -> list[list[int]]:
    """Return, per spatial dimension and tap, the least input size at which the tap meets data."""
    stride, padding, dilation, transposed, output_padding, _ = geometry
    result = []
    for index, (k, s, p, d) in enumerate(zip(kernel, stride, padding, dilation, strict=True)):
        taps = [(i * d - p, max(0, -((i * d - p) // s))) for i in range(k)]
        if transposed:
            extra = 2 * p - d * (k - 1) - output_padding[index]
            result.append([1 + max(j, -(-(offset + s * j + extra) // s)) for offset, j in taps])
        else:
            result.append([1 + s * j + max(offset, d * (k - 1) - 2 * p) for offset, j in taps])
    return result


def needs_padding(weight: Tensor, x: Tensor, geometry: Geometry) -> bool:
    """Return whether oneDNN may compute this convolution's weight gradient wrongly.

    Conditions on symbolic sizes become guards. In FP32 only 3-D convolutions are affected.
    """
    if x.device.type != "cpu" or (weight.dtype.itemsize >= 4 and weight.dim() < 5):
        return False
    return any(unsafe_dimensions(weight.shape[2:], x.shape[2 - weight.dim() :], geometry))


def unsafe_dimensions(kernel: Sequence[int], size: Sequence[int], geometry: Geometry) -> list[bool]:
    """Return for each spatial dimension whether it has to be padded; True if it is symbolic."""
    stride, padding, dilation, transposed, output_padding, groups = geometry
    numbers = [*kernel, *stride, *padding, *dilation, *output_padding]
    if not all(isinstance(number, int) for number in numbers):
        return [True] * len(kernel)
    # Depthwise 3-D gradients are wrong, in FP32 too, unless the data is longer by the stride.
    depthwise_3d = len(kernel) == 3 and groups != 1
    tap_sizes = least_sizes(kernel, geometry)
    result = []
    each = zip(size, kernel, stride, padding, dilation, strict=True)
    for index, (n, k, s, p, d) in enumerate(each):
        extent = d * (k - 1) + 1
        data = n
        if transposed:  # its padded side is its output
            data = (n - 1) * s - 2 * p + extent + output_padding[index]
        conditions = data >= extent + (s - 1) * depthwise_3d, *(n >= m for m in tap_sizes[index])
        result.append(p != 0 and not all(guard_or_false(condition) for condition in conditions))
    return result


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    geometry: Geometry,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias, None if not `needed`.

    `gradient` is `[N, O, *size']`, `x` `[N, C, *size]`, `weight` `[O, C / groups, *kernel]`,
    transposed `[C, O / groups, *kernel]`. `bias_sizes` is None without a bias.
    """
    backward: Any = called(torch.ops.aten.convolution_backward.default, gradient)
    if not any(needed[1:]) or not needs_padding(weight, x, geometry):
        to_x, to_weight, to_bias = backward(gradient, x, weight, bias_sizes, *geometry, needed)
        return to_x, to_weight, to_bias
    to_x = None
    if needed[0]:
        to_x = backward(gradient, x, weight, None, *geometry, [True, False, False])[0]
    sides, padded = _explicit(weight, x, geometry)
    if geometry[3]:
        gradient = F.pad(gradient, sides)
    else:
        x = F.pad(x, sides)
    only = [False, *needed[1:]]
    _, to_weight, to_bias = backward(gradient, x, weight, bias_sizes, *padded, only)
    return to_x, to_weight, to_bias


def _explicit(weight: Tensor, x: Tensor, geometry: Geometry) -> tuple[list[int], Geometry]:
    """Return the amounts for `F.pad`, and the geometry with the remaining padding."""
    stride, padding, dilation, transposed, output_padding, groups = geometry
    unsafe = unsafe_dimensions(weight.shape[2:], x.shape[2:], geometry)
    amounts = [p * pad for p, pad in zip(padding, unsafe, strict=True)]
    remaining = [p * (not pad) for p, pad in zip(padding, unsafe, strict=True)]
    sides = [amount for amount in reversed(amounts) for _ in range(2)]
    return sides, (stride, remaining, dilation, transposed, output_padding, groups)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the output of a convolution.

    oneDNN computes grouped 3-D convolutions in BF16 wrongly if a group has one input channel, the
    input is channels-last and the kernel is longer than the data; these are padded too.
    """
    grouped = weight.dim() == 5 and weight.shape[1] == 1 and geometry[5] != 1 and not geometry[3]
    if grouped and needs_padding(weight, x, geometry):
        sides, geometry = _explicit(weight, x, geometry)
        x = F.pad(x, sides)
    result: Tensor = called(torch.ops.aten.convolution.default, x)(x, weight, bias, *geometry)
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


@define(
    "padded_convolution(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, "
    "SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, "
    "SymInt groups) -> Tensor",
    "CompositeImplicitAutograd",
)
def _padded_convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    if input.dim() < weight.dim():
        return _padded_convolution(input.unsqueeze(0), weight, bias, *rest).squeeze(0)
    result: Tensor = _Convolution.apply(input, weight, bias, rest)  # type: ignore[no-untyped-call]
    return result
