"""Rounding to a format in plain torch: the definition that every kernel reproduces.

Invariant: the same inputs give the same bits in every kernel for a kind of device, and without
randomness on every device. An element's random number depends only on the seed, the stream and its
position in memory. FP32 true division is the only inexact step of quantization.
Random numbers are the device's: on CUDA Philox (`philox`), on the CPU the hash `lowbias32` (C.
Wellons, "Prospecting for Hash Functions", 2018) in int64 arithmetic. Stochastic rounding is
unbiased: up with the probability of the fraction (QSync, section IV-A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from qsync_fx.backend.numerics import philox
from qsync_fx.formats import Precision
from qsync_fx.rounding import Rounding

SMALLEST_SCALE: Final = 2.0**-126
"""Smallest normal FP32 number: a smaller scale would lose bits, or be flushed to zero."""

_LOW: Final = 0xFFFFFFFF
_Words = TypeVar("_Words", int, Tensor)


def _mix(word: _Words) -> _Words:
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _LOW
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _LOW
    return word ^ (word >> 16)


def uniform(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Return a multiple of 2**-24 in [0, 1) for each element of `like`: FP32, same layout.

    On CUDA devices it is `philox.uniform`.

    Args:
        like: dense; only sizes, strides and device are read.
        seed: int64, `[1]` or `[]`.
        stream: distinguishes operators of one graph; its low 32 bits count.
    """
    if like.device.type == "cuda":
        return philox.uniform(like, seed, stream)
    seed = seed.to(like.device).reshape(())
    key = _mix((seed & _LOW) ^ _mix(((seed >> 32) & _LOW) ^ _mix((stream + 0x9E3779B9) & _LOW)))
    place = torch.arange(like.numel(), device=like.device).as_strided(like.size(), like.stride())
    if like.numel() > 1 << 32:  # up to there the high word is zero, and one key serves them all
        key = key ^ (place >> 32)
    key = _mix(key)
    word = _mix((((place & _LOW) * 0x9E3779B1) + key) & _LOW)
    return (word >> 8).float() * 2.0**-24


def _draw(like: Tensor, seed: Tensor, stream: int, rounding: Rounding) -> Tensor | None:
    return uniform(like, seed, stream) if rounding == "stochastic" else None


def _to_integers(t: Tensor, rounding: Rounding, random: Tensor | None) -> Tensor:
    """Round to integers; `random` is None unless rounding is stochastic."""
    if rounding == "nearest":
        return t.round()
    below = t.floor()
    if random is None:
        return below
    return below + (random < t - below)


def _step(value: Tensor, row: Precision) -> Tensor:
    """Return the grid step of a float format at each FP64 value, a power of two."""
    exponent = ((value.view(torch.int64) >> 52) & 0x7FF) - 1023
    return ((exponent.clamp(min=row.e_min) - row.mantissa + 1023) << 52).view(torch.float64)


def to_grid(value: Tensor, row: Precision, rounding: Rounding, random: Tensor | None) -> Tensor:
    """Return the FP32 `value` rounded to the grid of a format and saturated; NaN stays NaN.

    Float formats are rounded in FP64, which is exact in units of the step; integers in FP32, where
    the fraction of a small negative value is rounded to the 2**-24 resolution of `random`.
    """
    if row.kind == "integer":
        return _to_integers(value, rounding, random).clamp(-row.max, row.max)
    wide = value.double()
    step = _step(wide, row)
    rounded = (_to_integers(wide / step, rounding, random) * step).clamp(-row.max, row.max).float()
    # Preserve the sign of zero.
    return rounded.copysign(value)


def scale_shape(x: Tensor, keep: Sequence[int]) -> list[int | torch.SymInt]:
    """Return the shape of the scale: `[]`, or `x.shape` with 1 in dimensions outside `keep`."""
    if not keep:
        return []
    separate = {dim % x.dim() for dim in keep}
    return [size if dim in separate else 1 for dim, size in enumerate(x.shape)]


def scales(
    x: Tensor,
    row: Precision,
    keep: Sequence[int],
    divide: Callable[[Tensor, Tensor], Tensor] = torch.true_divide,
) -> Tensor:
    """Return the FP32 scale of each group: `max(absmax / levels, 2**-126)`.

    It is 1 for all-zero and empty groups, NaN for groups with NaN or Inf. `divide` must round once
    on every device.
    """
    if not x.numel():
        return x.new_ones(scale_shape(x, keep), dtype=torch.float32)
    separate = {dim % x.dim() for dim in keep}
    largest = x.abs()
    if shared := [dim for dim in range(x.dim()) if dim not in separate]:
        largest = largest.amax(shared, keepdim=bool(keep))
    largest = largest.float()
    # The divisor is a tensor: some devices multiply by the rounded inverse of a number.
    scale = divide(largest, largest.new_full((), row.max)).clamp(min=SMALLEST_SCALE)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))


def empty_quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor with the shape and memory layout of `x`.

    torch preserves any row stride of a matrix with one row, but oneDNN's INT8 product uses it as
    the row length. So contiguous tensors get the strides that their shape implies, except with four
    or more dimensions, where strides of dimensions of size 1 distinguish channels-last.
    """
    if x.dim() < 4 and x.is_contiguous():
        return x.new_empty(x.shape, dtype=dtype)
    return torch.empty_like(x, dtype=dtype)


@torch.no_grad()
def quantize(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `(q, scale)` with `q * scale` near `x`; see `qsync::quantize`."""
    q = empty_quantized(x, row.dtype)
    scale = scales(x, row, keep)
    random = _draw(q, seed, stream, rounding)
    rounded = to_grid(x.float() / scale, row, rounding, random)
    q.copy_(torch.where(scale.isnan(), torch.zeros_like(rounded), rounded))
    return q, scale


@torch.no_grad()
def round_to(x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding) -> Tensor:
    """Return `x` on the grid of an unscaled format; see `qsync::round`."""
    y = torch.empty_like(x, dtype=row.dtype)
    random = _draw(y, seed, stream, rounding)
    value = x.float()
    return y.copy_(torch.where(value.isfinite(), to_grid(value, row, rounding, random), value))
