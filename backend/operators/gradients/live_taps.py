"""Sizes of convolutions: the output, and the input from which on each tap of the kernel meets data.

A tap may reach into the padding at every output: eight of the nine of a 3 x 3 kernel with stride 2
on an image of one pixel. `explicit_padding` says why that matters.
"""

from __future__ import annotations

from collections.abc import Sequence

Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]
"""Arguments of `aten::convolution`: stride, padding, dilation, transposed, output_padding, groups."""


def places(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Returns how many places a window has along one dimension of the input: the size of the output."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


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
