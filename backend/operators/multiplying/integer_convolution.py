"""`qsync::integer_convolution`: the sums of a convolution of INT8 values, by the CPU's unit for matrix products of integers.

Why not torch's quantized convolutions: they take weights packed ahead, and packing them anew each step costs more than the unit gains.
A window's values side by side make a convolution a matrix product, whose operands lie as they are; windows are copied at one byte a
value, a few at a time, which costs less than the conversion to a float does.

Invariant: sums are exact; its results have their channels last in memory, as the products of `qsync::conv2d_product`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_fx.backend.operators.gradients.live_taps import Geometry, places
from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.multiplying import integers
from qsync_fx.precision import Precision

_WINDOWS: Final = 2**20
"""Bytes of windows that are copied at a time, so that they are still in a cache when they are multiplied."""


def sums(xq: Tensor, wq: Tensor, geometry: Geometry, row: Precision) -> Tensor | None:
    """Returns the convolution of a batch `[N, C, *size]` with `[O, C, *kernel]` in INT32, each sum exact; None without a unit for it."""
    stride, padding, dilation, transposed, _, groups = geometry
    inner = math.prod(wq.shape[1:])
    if (
        transposed
        or groups != 1
        or xq.device.type != "cpu"
        or not integers.summed_exactly(xq.device, inner, (row, row))
    ):
        return None
    found: Tensor = torch.ops.qsync.integer_convolution.default(xq, wq, stride, padding, dilation)
    return found


def _size(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    windows = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [places(*window) for window in windows]


def _compute(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    size = _size(x, weight, stride, padding, dilation)
    last = x.movedim(1, -1)
    if any(padding):
        last = F.pad(last, [0, 0, *(p for p in reversed(padding) for _ in range(2))])
    last = last.contiguous()
    steps = last.stride()
    # [N, *size, *kernel, C], of which nothing is copied yet.
    windows = last.as_strided(
        (x.shape[0], *size, *weight.shape[2:], x.shape[1]),
        (
            steps[0],
            *(step * s for step, s in zip(steps[1:-1], stride, strict=True)),
            *(step * d for step, d in zip(steps[1:-1], dilation, strict=True)),
            1,
        ),
    )
    columns = integers.strided(weight.movedim(1, -1).reshape(weight.shape[0], -1))
    found = torch.empty((x.shape[0], *size, weight.shape[0]), dtype=torch.int32)
    for part, into in _parts(windows, found, columns.shape[1]):
        rows = integers.strided(part.reshape(-1, columns.shape[1]))
        torch._int_mm(rows, columns.t(), out=into.view(-1, columns.shape[0]))
    return found.movedim(-1, 1)


def _parts(windows: Tensor, found: Tensor, inner: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields windows and their results: samples, or rows of one."""
    one = math.prod(found.shape[1:-1]) * inner
    if one <= _WINDOWS:
        yield from _split(windows, found, one)
    else:
        for sample, into in zip(windows, found, strict=True):
            yield from _split(sample, into, one // found.shape[1])


def _split(windows: Tensor, found: Tensor, bytes_each: int) -> Iterator[tuple[Tensor, Tensor]]:
    count = max(1, _WINDOWS // max(1, bytes_each))
    yield from zip(torch.split(windows, count), torch.split(found, count), strict=True)


def _fake(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> Tensor:
    size = _size(x, weight, stride, padding, dilation)
    return x.new_empty((x.shape[0], *size, weight.shape[0]), dtype=torch.int32).movedim(-1, 1)


define(
    "integer_convolution(Tensor x, Tensor weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation) -> Tensor",
    {"CPU": _compute},
    _fake,
)
