"""INT8 products by torch's integer unit: oneDNN on the CPU, cuBLAS on CUDA.

`qsync::integer_products` multiplies two INT8 matrices or two stacks on the CPU: torch multiplies
stacks without the unit, and overflows. The second operand is passed transposed, as in `gemm`.
Invariant: integer sums are exact. If INT32 cannot represent every sum, or the unit saturates or
rejects the sizes, `product` and `sums` return None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.operators.conv_gradients import Geometry, places
from qsync_fx.backend.operators.registration import define
from qsync_fx.devices.cpu_features import cpu_multiplies_integers
from qsync_fx.formats import Precision, precision
from qsync_fx.torch_internals import _int_mm


def product(a: Tensor, bt: Tensor, formats: tuple[Precision, Precision]) -> Tensor | None:
    """Return `a @ bt.T` in INT32, each sum exact; None if torch has no such product.

    `a` is `[M, K]`, or on the CPU a stack `[E, M, K]`, `bt` `[N, K]` or `[E, N, K]`, any strides.
    """
    if not _summed_exactly(a.device, a.shape[-1], formats):
        return None
    if a.device.type == "cpu":
        return _integer_products(a, bt)
    if a.dim() == 3:
        return None
    if a.device.type != "cuda":
        return _int_mm(_strided(a), _strided(bt).t())
    if reference_result.takes_integers(a.shape[0], bt.shape[0], a.shape[1]):
        return reference_result.integer_product(a, bt)
    return None


def _summed_exactly(device: torch.device, inner: int, formats: tuple[Precision, Precision]) -> bool:
    """Return whether an integer unit sums `inner` products of two formats exactly in INT32."""
    if any(row.kind != "integer" or row.dtype != torch.int8 for row in formats):
        return False
    if inner * formats[0].max * formats[1].max >= 2**31:
        return False
    # With K = 1 oneDNN returns uninitialized memory (torch 2.13).
    return device.type != "cpu" or (inner != 1 and cpu_multiplies_integers())


def _strided(t: Tensor) -> Tensor:
    """Return a matrix, copied unless column-major or row-major and dense, for the CPU's unit."""
    if not t.is_contiguous():
        return t if t.t().is_contiguous() else t.contiguous()
    # oneDNN uses the row stride as the row length even with a single row, where any is valid.
    if t.stride(0) == t.shape[1]:
        return t
    return t.flatten().view(t.shape)


def _products_fake(a: Tensor, bt: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], bt.shape[-2]), dtype=torch.int32)


@define("integer_products(Tensor a, Tensor bt) -> Tensor", "CPU", _products_fake)
def _integer_products(a: Tensor, bt: Tensor) -> Tensor:
    if a.dim() == 2:
        return _int_mm(_strided(a), _strided(bt).t())
    result = _products_fake(a, bt)
    for item, other, into in zip(a, bt, result, strict=True):
        _int_mm(_strided(item), _strided(other).t(), out=into)
    return result


def _groups(offs: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for index, end in enumerate(offs.tolist()):
        if end > start:
            yield index, slice(start, end)
        start = end


def _product(
    a: Tensor, b: Tensor, formats: tuple[Precision, Precision], dtype: torch.dtype
) -> Tensor:
    exact = product(a, b.t(), formats)
    return a.to(dtype) @ b.to(dtype) if exact is None else exact


def _grouped_fake(
    a: Tensor, b: Tensor, offs: Tensor, a_format: str, b_format: str, dtype: torch.dtype
) -> Tensor:
    if b.dim() == 3:
        return a.new_empty((a.shape[0], b.shape[2]), dtype=dtype)
    return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=dtype)


_GROUPED = "Tensor a, Tensor b, Tensor offs, str a_format, str b_format, ScalarType dtype"


@define(f"grouped_products({_GROUPED}) -> Tensor", "CPU", _grouped_fake)
def grouped_products(
    a: Tensor, b: Tensor, offs: Tensor, a_format: str, b_format: str, dtype: torch.dtype
) -> Tensor:
    """Multiply the matrices of each group (mixture of experts); rows of no group give zeros.

    `a` and `b` are `[S, K]` and `[E, K, N]`, the result `[S, N]`; or `[M, S]` and `[S, N]`, the
    result `[E, M, N]`. `offs` is `[E]`, the end of each group in S, known at run time only.
    """
    formats = precision(a_format), precision(b_format)
    result = _grouped_fake(a, b, offs, a_format, b_format, dtype).zero_()
    for index, rows in _groups(offs):
        if b.dim() == 3:
            result[rows] = _product(a[rows], b[index], formats, dtype)
        else:
            result[index] = _product(a[:, rows], b[rows], formats, dtype)
    return result


_WINDOWS: Final = 2**20
"""Bytes of windows per chunk, small enough to stay in a cache until they are multiplied."""


def sums(xq: Tensor, wq: Tensor, geometry: Geometry, row: Precision) -> Tensor | None:
    """Return the exact INT32 sums of a convolution; None without an integer unit.

    `xq` is `[N, C, *size]`, `wq` `[O, C, *kernel]`. Windows are copied in chunks: torch's quantized
    convolutions require prepacked weights, and packing costs more than the unit gains.
    """
    stride, padding, dilation, transposed, _, groups = geometry
    if transposed or groups != 1 or xq.device.type != "cpu":
        return None
    if not _summed_exactly(xq.device, math.prod(wq.shape[1:]), (row, row)):
        return None
    return _integer_convolution(xq, wq, stride, padding, dilation)


def _convolution_fake(x: Tensor, weight: Tensor, *window: Sequence[int]) -> Tensor:
    size = [places(*sizes) for sizes in zip(x.shape[2:], weight.shape[2:], *window, strict=True)]
    return x.new_empty((x.shape[0], *size, weight.shape[0]), dtype=torch.int32).movedim(-1, 1)


_WINDOW = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"


@define(
    f"integer_convolution(Tensor x, Tensor weight, {_WINDOW}) -> Tensor", "CPU", _convolution_fake
)
def _integer_convolution(x: Tensor, weight: Tensor, *window: Sequence[int]) -> Tensor:
    stride, padding, dilation = window
    result = _convolution_fake(x, weight, *window)
    by_pixel, last = result.movedim(1, -1), x.movedim(1, -1)
    if any(padding):
        last = F.pad(last, [0, 0, *(p for p in reversed(padding) for _ in range(2))])
    last = last.contiguous()
    batch, *steps, _ = last.stride()
    # [N, *size, *kernel, C], a view.
    outer = [step * s for step, s in zip(steps, stride, strict=True)]
    inner = [step * d for step, d in zip(steps, dilation, strict=True)]
    size = *by_pixel.shape[:-1], *weight.shape[2:], x.shape[1]
    windows = last.as_strided(size, (batch, *outer, *inner, 1))
    columns = _strided(weight.movedim(1, -1).reshape(weight.shape[0], -1))
    for part, into in _chunks(windows, by_pixel, columns.shape[1]):
        rows = _strided(part.reshape(-1, columns.shape[1]))
        _int_mm(rows, columns.t(), out=into.view(-1, columns.shape[0]))
    return result


def _chunks(windows: Tensor, result: Tensor, inner: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows and their results in chunks: several samples, or rows of one sample."""
    pairs = [(windows, result)]
    if math.prod(result.shape[1:-1]) * inner > _WINDOWS:
        pairs = list(zip(windows, result, strict=True))
    for part, into in pairs:
        count = max(1, _WINDOWS // max(1, math.prod(into.shape[1:-1]) * inner))
        yield from zip(torch.split(part, count), torch.split(into, count), strict=True)
