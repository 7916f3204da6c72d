"""`qsync::live_taps`: a convolution's weight, or its gradient, with zeros at the taps that never meet data.

Such taps reach into the padding at every output: eight of the nine of a 3 x 3 kernel with stride 2 on an image of one pixel. Their gradient
is zero. oneDNN's kernels for AMX leave it unwritten where the convolution has a stride and a type narrower than FP32: what lay in memory
comes out, infinities included (docs/known-issues.md). Zeros in the weight change no output, and their own backward function gives zeros
for whatever comes in.

Invariant: which taps are dead follows from sizes alone. Nothing is computed where none is, if the sizes say so before they have values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qsync_fx.backend.operators.library import define

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]
"""Arguments of `aten::convolution`: stride, padding, dilation, transposed, output_padding, groups."""


def places(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Returns how many places a window has along one dimension of the input: the size of the output."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def live_taps(weight: Tensor, x: Tensor, geometry: Geometry) -> Tensor:
    """Returns a weight, or its gradient, with zeros at the dead taps.

    The tap at `i` multiplies the value at `i * dilation - padding + stride * j` of the padded side, input or transposed output, by the
    value at `j` of the other side. The first `j` that does not lie in front of the data decides: both sides must reach that far.

    Args:
        weight: `[O, C / groups, *kernel]`, transposed `[C, O / groups, *kernel]`, floating point.
        x: `[N, C, *size]` or `[C, *size]`: the convolution's input, of which only the size is read.
        geometry: of the convolution; it may be symbolic as sizes may.
    """
    stride, padding, dilation, transposed, output_padding, _ = geometry
    spatial = weight.dim() - 2
    for at, (k, s, p, d) in enumerate(zip(weight.shape[2:], stride, padding, dilation, strict=True)):
        n = x.shape[at - spatial]
        padded, other = n, places(n, k, s, p, d)
        if transposed:
            padded, other = (n - 1) * s - 2 * p + d * (k - 1) + output_padding[at] + 1, n
        offset = torch.arange(k, device=weight.device) * d - p
        first = (-torch.div(offset, s, rounding_mode="floor")).clamp(min=0)
        dead = (first >= other) | (offset + first * s >= padded)
        weight = weight.masked_fill(dead.view(-1, *[1] * (spatial - 1 - at)), 0)
    return weight


def least_sizes(kernel: Sequence[int], geometry: Geometry) -> list[list[int]]:
    """Returns, for each spatial dimension and tap, the smallest size of the input at which the tap meets data."""
    stride, padding, dilation, transposed, output_padding, _ = geometry
    found = []
    for at, (k, s, p, d) in enumerate(zip(kernel, stride, padding, dilation, strict=True)):
        taps = [(i * d - p, max(0, -((i * d - p) // s))) for i in range(k)]
        if transposed:
            extra = 2 * p - d * (k - 1) - output_padding[at]
            found.append([1 + max(j, -(-(offset + s * j + extra) // s)) for offset, j in taps])
        else:
            found.append([1 + s * j + max(offset, d * (k - 1) - 2 * p) for offset, j in taps])
    return found


def may_be_dead(weight: Tensor, x: Tensor, geometry: Geometry) -> bool:
    """Whether oneDNN may leave taps of this weight's gradient unwritten: false where sizes say so whatever symbolic ones come out as."""
    if x.device.type != "cpu" or weight.dtype.itemsize >= 4 or all(step == 1 for step in geometry[0]):
        return False
    numbers = [*weight.shape[2:], *(number for part in (*geometry[:3], geometry[4]) for number in part)]
    if not all(isinstance(number, int) for number in numbers):
        return True
    least = least_sizes(weight.shape[2:], geometry)
    return not all(statically_known_true(n >= max(taps)) for n, taps in zip(x.shape[-len(least) :], least, strict=True))


def _live_taps(weight: Tensor, x: Tensor, *geometry: object) -> Tensor:
    return live_taps(weight, x, (*geometry, 1))  # type: ignore[arg-type]


define(
    "live_taps(Tensor weight, Tensor x, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding) "
    "-> Tensor",
    {"CompositeImplicitAutograd": _live_taps},
)
