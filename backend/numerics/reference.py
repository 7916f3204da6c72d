"""Rounding to a format in plain torch: the meaning of every kernel that does it faster.

Invariant: the same inputs give the same bits in every kernel of a kind of device, and on every device where nothing is random. The
random number of an element depends on the seed, the stream and the element's place in memory alone, so that nothing has to be
stored to repeat a rounding, and FP32 true division is the only inexact step of quantization.

Random numbers are those that the kernels of the device make: a hash on the CPU, Philox on CUDA devices (`philox`). The hash is
`lowbias32` (C. Wellons, "Prospecting for Hash Functions", 2018), here in int64 arithmetic, whose low 32 bits are those of uint32.
Stochastic rounding is that of QSync, section IV-A: up with the probability of the fraction, so the mean is the value.
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
"""The smallest normal FP32 number: a smaller scale would lose bits, or be flushed to zero."""

_LOW: Final = 0xFFFFFFFF
_Words = TypeVar("_Words", int, Tensor)


def _mix(word: _Words) -> _Words:
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _LOW
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _LOW
    return word ^ (word >> 16)


def uniform(like: Tensor, seed: Tensor, stream: int) -> Tensor:
    """Returns a multiple of 2**-24 in [0, 1) for each element of `like`, which must fill its memory without gaps: FP32, same layout.

    On CUDA devices it is `philox.uniform`.

    Args:
        like: its sizes, strides and device are what counts.
        seed: one int64, `[1]` or `[]`.
        stream: tells operators of one graph apart; its low 32 bits count.
    """
    if like.device.type == "cuda":
        return philox.uniform(like, seed, stream)
    seed = seed.to(like.device).reshape(())
    key = _mix((seed & _LOW) ^ _mix(((seed >> 32) & _LOW) ^ _mix((stream + 0x9E3779B9) & _LOW)))
    place = torch.arange(like.numel(), device=like.device).as_strided(like.size(), like.stride())
    # The high word is zero for all tensors that fit today's memories, and then one key serves every element.
    key = _mix(key ^ (place >> 32)) if like.numel() > 1 << 32 else _mix(key)
    word = _mix((((place & _LOW) * 0x9E3779B1) + key) & _LOW)
    return (word >> 8).float() * 2.0**-24


def _whole(t: Tensor, rounding: Rounding, random: Tensor | None) -> Tensor:
    """Rounds to whole numbers; `random` is given for stochastic rounding."""
    if rounding == "nearest":
        return t.round()
    below = t.floor()
    return below if random is None else below + (random < t - below)


def _step(value: Tensor, row: Precision) -> Tensor:
    """Returns the distance of the two neighbours of each FP64 value in a float format, a power of two."""
    exponent = ((value.view(torch.int64) >> 52) & 0x7FF) - 1023
    return ((exponent.clamp(min=row.e_min) - row.mantissa + 1023) << 52).view(torch.float64)


def to_grid(value: Tensor, row: Precision, rounding: Rounding, random: Tensor | None) -> Tensor:
    """Returns the FP32 `value` rounded to the grid of a format, saturated at its largest magnitude; NaN stays NaN.

    Floor means towards minus infinity. Float formats are rounded in FP64, which holds a value in units of its step exactly; integers in
    FP32, where the fraction of a small negative value is rounded to the 2**-24 that `random` is a multiple of.
    """
    if row.kind == "integer":
        return _whole(value, rounding, random).clamp(-row.max, row.max)
    wide = value.double()
    step = _step(wide, row)
    rounded = (_whole(wide / step, rounding, random) * step).clamp(-row.max, row.max).float()
    # What becomes zero keeps its sign.
    return rounded.copysign(value)


def reduced(ndim: int, keep: Sequence[int]) -> list[int]:
    """Returns the dimensions that share one scale, all but those in `keep`."""
    saved = {dim % ndim for dim in keep}
    return [dim for dim in range(ndim) if dim not in saved]


def scale_shape(x: Tensor, keep: Sequence[int]) -> list[int | torch.SymInt]:
    """Returns the shape of the scale: `[]` for one scale, else that of `x` with 1 in each dimension that is not in `keep`."""
    shared = reduced(x.dim(), keep) if keep else []
    return [1 if dim in shared else size for dim, size in enumerate(x.shape)] if keep else []


def scales(
    x: Tensor,
    row: Precision,
    keep: Sequence[int],
    divide: Callable[[Tensor, Tensor], Tensor] = torch.true_divide,
) -> Tensor:
    """Returns the FP32 scale of each group: `max(absmax / levels, 2**-126)`, 1 for all-zero and empty groups, NaN for NaN and Inf.

    `divide` rounds once, whoever computes.
    """
    shared = reduced(x.dim(), keep)
    magnitude = x.abs()
    if not x.numel():
        return torch.ones(
            [int(size) for size in scale_shape(x, keep)], dtype=torch.float32, device=x.device
        )
    if shared:
        magnitude = magnitude.amax(shared, keepdim=bool(keep))
    largest = magnitude.float()
    # A tensor as the divisor: division by a number is multiplication by its rounded inverse on some devices.
    scale = divide(largest, largest.new_full((), row.max)).clamp(min=SMALLEST_SCALE)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))


def empty_quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor without values of `x`'s shape and memory layout.

    Of a matrix with one row any stride between rows is right, and torch keeps the one that it finds, such as that of a transposed
    column; oneDNN's INT8 product takes it for the length of a row. So strides are those that the shape implies, where the layout is.
    """
    if (
        x.dim() < 4 and x.is_contiguous()
    ):  # with four, strides of dimensions of size 1 say whether channels come last
        return x.new_empty(x.shape, dtype=dtype)
    return torch.empty_like(x, dtype=dtype)


@torch.no_grad()
def quantize(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns `(q, scale)` with `q * scale` near `x`; see `qsync::quantize`."""
    q = empty_quantized(x, row.dtype)
    scale = scales(x, row, keep)
    random = uniform(q, seed, stream) if rounding == "stochastic" else None
    rounded = to_grid(x.float() / scale, row, rounding, random)
    q.copy_(torch.where(scale.isnan(), torch.zeros_like(rounded), rounded))
    return q, scale


@torch.no_grad()
def round_to(x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding) -> Tensor:
    """Returns `x` on the grid of an unscaled format; see `qsync::round`."""
    y = torch.empty_like(x, dtype=row.dtype)
    random = uniform(y, seed, stream) if rounding == "stochastic" else None
    value = x.float()
    return y.copy_(torch.where(value.isfinite(), to_grid(value, row, rounding, random), value))
