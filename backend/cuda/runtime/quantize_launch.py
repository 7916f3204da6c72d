"""Launch of the quantizer kernel, and the warning about missing kernels of a device.

The kernel sees the memory of the result as a matrix whose rows or columns are the scale groups.
`reference.quantize` computes if the kernel does not fit.

Invariant: the result has the bits of `reference.quantize` on a CUDA device, whose random numbers
are indexed by position in memory.

`tell` warns about missing kernels, their cost and the remedy. It only reports the findings of
`device_state`; kernels that the user switched off do not count as missing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.codegen import TranslationUnit, written
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.problem.problem_from_tensors import LARGEST_SIZE, format_name
from qsync_fx.backend.cuda.runtime import call_cache, launch_utils
from qsync_fx.backend.cuda.runtime.call_cache import TYPES, Groups, QuantizerSite
from qsync_fx.backend.cuda.runtime.device_state import DeviceState, known_of
from qsync_fx.backend.numerics import reference
from qsync_fx.devices.format_support import capability, row_on
from qsync_fx.errors import KernelError, PlanWarning
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.rounding import Rounding

_FLOATS_OF_A_BYTE: Final = (8, 9)
"""Lowest compute capability for which Triton converts to one-byte floats."""


def quantize(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `(q, scale)` with `q * scale` near `x`, on a CUDA device; see `qsync::quantize`."""
    result = _by_kernel(x, seed, stream, row, rounding, keep, transposed=False)
    if result is None:
        return reference.quantize(x, seed, stream, row, rounding, keep)
    q, scale = result
    return q, scale


def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(q, transpose, scale)` of a matrix; see `qsync::quantize_transposed`."""
    result = _by_kernel(x, seed, stream, row, rounding, (), transposed=True)
    if result is not None:
        q, transpose, scale = result
        return q, transpose, scale
    q, scale = quantize(x, seed, stream, row, rounding, ())
    return q, q.t().clone(memory_format=torch.contiguous_format), scale


def again(
    x: Tensor,
    seed: Tensor,
    stream: int,
    fmt: str,
    rounding: str,
    keep: Sequence[int] = (),
    transposed: bool = False,
) -> tuple[Tensor, ...] | None:
    """Quantize by the cached call site for the layout of `x`; None if there is none or it fails."""
    key = _key(x, fmt, rounding, keep, transposed)
    site = call_cache.cached_quantizer_call.get(key)
    if site is None:
        return None
    try:
        return site(x, seed, stream, transposed)
    except KernelError as error:
        launch_utils.failed(site.library, f"{_shown(x)} -> {fmt}", error)
        call_cache.cached_quantizer_call.pop(key, None)
        return None


def _key(
    x: Tensor, fmt: str, rounding: str, keep: Sequence[int], transposed: bool
) -> tuple[object, ...]:
    return (
        kernel_registry.refusals(), x.device, x.dtype, x.shape, x.stride(), x.data_ptr() & 15, fmt,
        rounding, transposed, *keep,
    )  # fmt: skip


def _by_kernel(
    x: Tensor,
    seed: Tensor,
    stream: int,
    row: Precision,
    rounding: Rounding,
    keep: Sequence[int],
    transposed: bool,
) -> tuple[Tensor, ...] | None:
    """Return the result of a kernel; None, with a noted reason, if there is no suitable kernel."""
    result = again(x, seed, stream, row.name, rounding, keep, transposed)
    if result is not None:
        return result
    q = reference.empty_quantized(x, row.dtype)
    if transposed and not (q.numel() and q.is_contiguous()):
        return None
    library = _library(x, row)
    if library is None:
        return None
    groups = Groups(int(q.shape[0]), int(q.shape[1]), 0) if transposed else groups_of(q, keep)
    if groups is None:
        launch_utils.note(
            f"{_shown(x)} -> {row}", "the values of a group are not contiguous rows or columns"
        )
        return None
    site = QuantizerSite(library, x, q, row, rounding, keep, groups)
    try:
        result = site(x, seed, stream, transposed)
    except KernelError as error:
        launch_utils.failed(library, f"{_shown(x)} -> {row}", error)
        return None
    call_cache.cached_quantizer_call.keep(_key(x, row.name, rounding, keep, transposed), site)
    return result


def _library(x: Tensor, row: Precision) -> Library | None:
    unit = _unit(x, row)
    if isinstance(unit, str):
        launch_utils.note(f"{_shown(x)} -> {row}", unit)
        return None
    return launch_utils.library(unit, x.device, f"{_shown(x)} -> {row}")


def _unit(x: Tensor, row: Precision) -> TranslationUnit | str:
    """Return the translation unit that quantizes `x` to a format, or why there is none."""
    result = known_of(x.device)
    source = format_name(x.dtype if x.dtype in TYPES else torch.float32)
    if result.arch is None or source is None:
        return result.reason
    target = written(row)
    if target is None:
        return f"qsync_fx has no quantization kernel for {row}"
    return kernel_registry.quantizer(result.arch, source, target)


def fused(x: Tensor, row: Precision) -> bool:
    """Return whether a compiled graph should quantize `x` by fused operators instead of a kernel.

    This requires a non-empty `x`, a format that the compiler converts to, and that no kernel is
    available, as far as is known without compiling one.
    """
    if isinstance(x.numel(), int) and x.numel() == 0:
        return False
    if not compiles(row, x.device):
        return False
    unit = _unit(x, row)
    if isinstance(unit, str) or kernel_registry.failure(unit) is not None:
        return True
    return not (known_of(x.device).compiles or kernel_registry.stored(unit))


def compiles(row: Precision, device: torch.device) -> bool:
    """Return whether the compiler converts to a scaled format on a device.

    Otherwise, without a kernel, each operator of the quantization is a launch of its own.
    """
    return not row.dtype.is_floating_point or capability(device) >= _FLOATS_OF_A_BYTE


def _shown(x: Tensor) -> str:
    return f"quantize {' x '.join(map(str, x.shape))} {format_name(x.dtype) or x.dtype}"


def groups_of(q: Tensor, keep: Sequence[int]) -> Groups | None:
    """Return the scale groups of a dense tensor as rows or columns of its memory; None otherwise.

    Args:
        keep: dimensions that have a scale per index.
    """
    saved = []
    if q.dim():
        saved = [dim for dim in sorted({dim % q.dim() for dim in keep}) if q.shape[dim] != 1]
    order = sorted((dim for dim in range(q.dim()) if q.shape[dim] != 1), key=q.stride, reverse=True)
    total, number = q.numel(), math.prod(q.shape[dim] for dim in saved)
    if not total:
        return None
    if not saved:
        # One row if its length fits INT32, else one row per index of the outermost dimension.
        rows = 1 if total <= LARGEST_SIZE else int(q.shape[order[0]])
        return Groups(rows, total // rows, 0)
    if order[: len(saved)] == saved:
        return Groups(number, total // number, 1)
    return Groups(total // number, number, 2) if order[-len(saved) :] == saved else None


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
    transposed: Tensor | None = None,
) -> Tensor:
    """Fill `q`, and its transpose if given, and return the scales.

    Raises:
        KernelError: the kernel does not accept these arguments or cannot be launched.
    """
    return QuantizerSite(library, x, q, row, rounding, keep, groups).fill(
        x, q, transposed, seed, stream
    )


QUANTIZING: Final = (
    "values are quantized by code that the compiler fuses, which draws eight "
    "times as many random numbers as the kernels of qsync_fx"
)
ONE_BY_ONE: Final = (
    "but to FP8 operator by operator, in about two hundred launches per tensor, "
    "because the compiler cannot convert to 8-bit floats for compute capability {capability}"
)
PRODUCTS: Final = (
    "cuBLAS multiplies INT8 where it supports the sizes; all other products in "
    "INT8, FP8 and TF32 are computed in {carrier} and are no faster than that"
)

_told: set[str] = set()


def tell(device: torch.device) -> None:
    """Warn about the missing kernels of a device, once per process and message."""
    text = told(device)
    if text and text not in _told:
        _told.add(text)
        warnings.warn(text, PlanWarning, stacklevel=2)


def told(device: torch.device) -> str:
    """Return the warning of `tell` for a device; "" if no kernels are missing."""
    result = known_of(device)
    if result.mend is None or result.lacks is None:
        return ""
    name = "the GPU" if device.index is None else str(device)
    return (
        f"{name} runs without the kernels of qsync_fx: {result.lacks}. The numbers are the "
        f"same. {costs(result, device)}. To fix this: {result.mend}"
    )


def costs(result: DeviceState, device: torch.device) -> str:
    """Return the cost of the missing kernels as a sentence without a full stop."""
    carriers = {
        str(row_on(device, row).carrier) for row in FORMATS.values() if row.kind == "integer"
    }
    products = PRODUCTS.format(carrier=" and ".join(sorted(carriers)))
    if result.arch is not None and result.compiles:
        return f"Only kernels for products are missing, except those compiled elsewhere: {products}"
    both = f"{products}; {_quantizing(device)}"
    if result.arch is None:
        return both
    return f"Only kernels that were compiled before are available; for all others, {both}"


def _quantizing(device: torch.device) -> str:
    """Return a clause that describes quantization without kernels."""
    if all(compiles(row, device) for row in FORMATS.values() if row.scaled):
        return QUANTIZING
    index = ".".join(map(str, capability(device)))
    return f"{QUANTIZING}, {ONE_BY_ONE.format(capability=index)}"
