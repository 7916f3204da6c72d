"""CPU rounding by the kernels of `qsync_fx._C`.

The kernels require dense memory and one scale per contiguous run. For other tensors and formats,
torch divides by the scales and the kernels only round. Invariant: the bits of `reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx import _C, torch_internals as internals
from qsync_fx.backend.numerics import reference
from qsync_fx.formats import Precision
from qsync_fx.rounding import Rounding

_TYPES: Final[dict[torch.dtype, Any]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


empty_on_cpu: Final = getattr(internals, "_empty_strided_cpu", _empty_strided)
"""Return an uninitialized CPU tensor of a size, strides (tuples of ints) and a dtype.

It is three times as fast as `torch.empty`, which costs as much as a small kernel.
"""


def quantize(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `(q, scale)` with `q * scale` near `x`; see `qsync::quantize`."""
    q = _empty_quantized(x, row.dtype)
    rows: int | None = 1
    random = 0, 0
    if rounding == "stochastic":
        random = _random(seed, stream)
    if keep:
        rows = _rows(q, keep)
    if rows is None or row.dtype != torch.int8:
        return _in_two_passes(x, q, random, row, rounding, keep)
    if keep:
        scale = x.new_empty(reference.scale_shape(x, keep), dtype=torch.float32)
    else:
        scale = empty_on_cpu((), (), torch.float32)
    _quantize(_filled(x, q.stride()), q, scale, rows, row, rounding, random)
    return q, scale


def _empty_quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `reference.empty_quantized(x, dtype)`, faster."""
    size = tuple(x.shape)
    # With dimensions of size 1, contiguous tensors may have other strides.
    if len(size) < 4 and min(size, default=0) > 1 and x.is_contiguous():
        result: Tensor = empty_on_cpu(size, x.stride(), dtype)
        return result
    return reference.empty_quantized(x, dtype)


@torch.no_grad()
def _in_two_passes(
    x: Tensor,
    q: Tensor,
    random: tuple[int, int],
    row: Precision,
    rounding: Rounding,
    keep: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Fill `q` with torch dividing by the scales; return `q` and the scales."""
    scale = reference.scales(x, row, keep)
    # One more value than elements, for the integer kernel below.
    memory = torch.zeros(x.numel() + 1, dtype=torch.float32)
    units = memory[:-1].as_strided(q.size(), q.stride())
    units.copy_(torch.where(scale.isnan(), 0.0, x.float() / scale))
    if row.kind == "float":
        _round(units, units, row, rounding, random)
        return q.copy_(units), scale
    # The kernel divides by the scale that it computes; the largest level as an extra value makes
    # that scale 1.
    memory.clamp_(-row.max, row.max)[-1] = row.max
    full = torch.empty_like(memory, dtype=row.dtype)
    _quantize(memory, full, torch.empty(1, dtype=torch.float32), 1, row, rounding, random)
    return q.copy_(full[:-1].as_strided(q.size(), q.stride())), scale


@torch.no_grad()
def round_to(x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding) -> Tensor:
    """Return `x` on the grid of an unscaled format; see `qsync::round`."""
    y = torch.empty_like(x, dtype=torch.float32)
    source = _filled(x, y.stride()) if x.dtype == torch.float32 else y.copy_(x)
    random = 0, 0
    if rounding == "stochastic":
        random = _random(seed, stream)
    _round(source, y, row, rounding, random)
    return y.to(row.dtype)


def _random(seed: Tensor, stream: int) -> tuple[int, int]:
    """Return seed and stream as the kernels' unsigned words."""
    return int(seed.item()) & (2**64 - 1), stream & (2**32 - 1)


def _filled(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return `x` in a dtype of the kernels and with these dense strides."""
    if x.dtype in _TYPES and x.stride() == stride:
        return x
    dtype = x.dtype if x.dtype in _TYPES else torch.float32
    return torch.empty_strided(x.size(), stride, dtype=dtype).copy_(x.detach())


def _rows(q: Tensor, keep: Sequence[int]) -> int | None:
    """Return the number of groups of `q` if they are contiguous runs in scale order, else None."""
    groups = [dim for dim in sorted({dim % q.dim() for dim in keep}) if q.shape[dim] != 1]
    outer = sorted((dim for dim in range(q.dim()) if q.shape[dim] != 1), key=q.stride, reverse=True)
    if outer[: len(groups)] != groups:
        return None
    return math.prod(q.shape[dim] for dim in groups)


def _quantize(
    source: Tensor,
    q: Tensor,
    scale: Tensor,
    rows: int,
    row: Precision,
    rounding: Rounding,
    random: tuple[int, int],
) -> None:
    columns, threads = source.numel() // (rows or 1), torch.get_num_threads()
    pointers = source.data_ptr(), q.data_ptr(), scale.data_ptr()
    _C.quantize(
        *pointers, rows, columns, _TYPES[source.dtype], rounding, int(row.max), *random, threads
    )


def _round(
    source: Tensor, to: Tensor, row: Precision, rounding: Rounding, random: tuple[int, int]
) -> None:
    pointers, threads = (source.data_ptr(), to.data_ptr()), torch.get_num_threads()
    _C.round_float(
        *pointers, to.numel(), row.mantissa, row.e_min, row.max, rounding, *random, threads
    )
