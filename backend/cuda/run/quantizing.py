"""From a tensor to the quantizer's kernel: which matrix it is, where its groups lie, and torch where the kernel does not fit.

Invariant: the bits of `reference.quantize` on a CUDA device, whose random numbers belong to places in memory: the kernel is shown the
memory of the result, in its order, as a matrix whose rows or columns are the groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.libraries import kernels
from qsync_fx.backend.cuda.libraries.abi import QuantizeArguments
from qsync_fx.backend.cuda.libraries.library import Library
from qsync_fx.backend.cuda.problem.operands import LARGEST_SIZE, format_name
from qsync_fx.backend.cuda.run import calls, reasons
from qsync_fx.backend.cuda.run.device import known_of
from qsync_fx.backend.cuda.source.quantizer_source import FORMATS, ROUNDINGS, X_TYPES, written
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.backend.numerics import reference
from qsync_fx.devices.counted import capability
from qsync_fx.errors import KernelError
from qsync_fx.precision import Precision, encoding
from qsync_fx.rounding.mode import Rounding

_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_FLOATS_OF_A_BYTE: Final = (8, 9)
"""The first compute capability that Triton converts to floats of one byte for."""


@dataclass(frozen=True)
class Groups:
    """Memory as a matrix. `group`: 0 one scale for all, 1 one for each row, 2 one for each column."""

    rows: int
    columns: int
    group: int


def quantize(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns `(q, scale)` with `q * scale` near `x`, on a CUDA device; see `qsync::quantize`."""
    q = reference.empty_quantized(x, row.dtype)
    scale = _filled(x, q, seed, stream, row, rounding, keep, groups_of(q, keep))
    return reference.quantize(x, seed, stream, row, rounding, keep) if scale is None else (q, scale)


def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(q, transpose, scale)` of a matrix; see `qsync::quantize_transposed`."""
    q = reference.empty_quantized(x, row.dtype)
    rows, columns = q.shape
    if q.numel() and q.is_contiguous():
        turned = q.new_empty(columns, rows)
        scale = _filled(x, q, seed, stream, row, rounding, (), Groups(rows, columns, 0), turned)
        if scale is not None:
            return q, turned, scale
    q, scale = quantize(x, seed, stream, row, rounding, ())
    return q, q.t().clone(memory_format=torch.contiguous_format), scale


def _filled(
    x: Tensor,
    q: Tensor,
    seed: Tensor,
    stream: int,
    row: Precision,
    rounding: Rounding,
    keep: Sequence[int],
    groups: Groups | None,
    turned: Tensor | None = None,
) -> Tensor | None:
    """Lets the kernel fill `q`, and `turned` with its transpose, and returns the scales; None, with a reason kept, where it does not."""
    library = _library(x, row)
    if library is None:
        return None
    if groups is None:
        reasons.note(_shown(x, row), "the values of a group do not lie in rows or columns of memory")
        return None
    try:
        return run(library, x, q, seed, stream, row, rounding, keep, groups, turned)
    except KernelError as error:
        reasons.note(_shown(x, row), error.what)
        return None


def _library(x: Tensor, row: Precision) -> Library | None:
    unit = _unit(x, row)
    if isinstance(unit, str):
        reasons.note(_shown(x, row), unit)
        return None
    return calls.library(unit, x.device, _shown(x, row))


def _unit(x: Tensor, row: Precision) -> Unit | str:
    """Returns what is compiled to quantize `x` to a format, or why nothing is."""
    found = known_of(x.device)
    source = format_name(x.dtype if x.dtype in _TYPES else torch.float32)
    if found.arch is None or source is None:
        return found.reason
    target = written(row)
    return (
        f"there is no quantizer of ours for {row}" if target is None else kernels.quantizer(found.arch, source, target)
    )


def fused(x: Tensor, row: Precision) -> bool:
    """Whether a compiled graph is to have operators that a compiler fuses in place of a kernel that quantizes `x` to a format.

    So it is where no kernel can be had, as far as is known before it is asked for, the compiler knows the format, and there are values.
    """
    if isinstance(x.numel(), int) and x.numel() == 0:
        return False
    if not compiles(row, x.device):
        return False
    unit = _unit(x, row)
    if isinstance(unit, str) or kernels.failure(unit) is not None:
        return True
    return not (known_of(x.device).compiles or kernels.stored(unit))


def compiles(row: Precision, device: torch.device) -> bool:
    """Whether the compiler converts to a scaled format on a device; else, where no kernel can be had, each operator is a launch."""
    return not row.dtype.is_floating_point or capability(device) >= _FLOATS_OF_A_BYTE


def _shown(x: Tensor, row: Precision) -> str:
    return f"quantize {' x '.join(map(str, x.shape))} {format_name(x.dtype) or x.dtype} -> {row}"


def groups_of(q: Tensor, keep: Sequence[int]) -> Groups | None:
    """Returns how the groups of a tensor without gaps lie in its memory; None where they are neither rows nor columns of it."""
    kept = [dim for dim in sorted({dim % q.dim() for dim in keep}) if q.shape[dim] != 1] if q.dim() else []
    order = sorted((dim for dim in range(q.dim()) if q.shape[dim] != 1), key=q.stride, reverse=True)
    total, number = q.numel(), math.prod(q.shape[dim] for dim in kept)
    if not total:
        return None
    if not kept:
        # One row, unless its length would not fit: then those of the outermost dimension.
        rows = 1 if total <= LARGEST_SIZE else int(q.shape[order[0]])
        return Groups(rows, total // rows, 0)
    if order[: len(kept)] == kept:
        return Groups(number, total // number, 1)
    return Groups(total // number, number, 2) if order[-len(kept) :] == kept else None


def run(
    library: Library,
    x: Tensor,
    q: Tensor,
    seed: Tensor,
    stream: int,
    row: Precision,
    rounding: Rounding,
    keep: Sequence[int],
    groups: Groups,
    turned: Tensor | None = None,
) -> Tensor:
    """Fills `q`, and `turned` with its transpose if given, and returns the scales.

    Raises:
        KernelError: the kernel does not take these arguments, or cannot be started.
    """
    with calls.guarded(x.device):
        x, ldx = _in_order(x, q, groups)
        scale = x.new_empty([int(size) for size in reference.scale_shape(q, keep)], dtype=torch.float32)
        seed = seed.to(x.device)
        arguments = QuantizeArguments(
            x=x.data_ptr(), q=q.data_ptr(), qt=None if turned is None else turned.data_ptr(), scale=scale.data_ptr(), seed=seed.data_ptr(),
            rows=groups.rows, columns=groups.columns, ldx=ldx, stream=stream & 0xFFFFFFFF,
            x_type=X_TYPES[str(format_name(x.dtype))], format=FORMATS[encoding(row).name], rounding=ROUNDINGS[rounding], group=groups.group,
            **calls.place(x.device),
        )  # fmt: skip
        calls.run(library, arguments, x.device)
    return scale


def _in_order(x: Tensor, q: Tensor, groups: Groups) -> tuple[Tensor, int]:
    """Returns `x` with its values in the order of `q`'s memory, a copy if need be, and the stride between its rows."""
    dtype = x.dtype if x.dtype in _TYPES else torch.float32
    if x.dtype == dtype:
        if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), q.stride(), strict=True)):
            return x, groups.columns
        by_rows = x.dim() == 2 and q.stride(1) == x.stride(1) == 1 and x.stride(0) >= x.shape[1]
        if by_rows and (groups.rows, groups.columns) == tuple(x.shape):
            return x, int(x.stride(0))
    return torch.empty_strided(q.shape, q.stride(), dtype=dtype, device=x.device).copy_(x), groups.columns
