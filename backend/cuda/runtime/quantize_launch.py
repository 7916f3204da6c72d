"""Launch of the quantizer kernel, and the warning about missing kernels of a device.

The kernel sees the memory of the result as a matrix whose rows or columns are the scale groups; if
it does not fit, `reference.quantize` computes. Both produce the same bits on a CUDA device, whose
random numbers are indexed by position in memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.codegen import (
    QUANTIZER_FORMATS,
    ROUNDINGS,
    X_TYPES,
    TranslationUnit,
    quantizer,
    written,
)
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import Library, QuantizeArguments
from qsync_fx.backend.cuda.problem.problem import LARGEST_SIZE, format_name
from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.cuda.runtime.device_state import known_of
from qsync_fx.backend.cuda.runtime.launch_utils import CallCache, Key
from qsync_fx.backend.numerics import reference
from qsync_fx.devices.format_support import capability, row_on
from qsync_fx.errors import KernelError, PlanWarning
from qsync_fx.formats import FORMATS, Precision, encoding
from qsync_fx.rounding import Rounding

_FLOATS_OF_A_BYTE: Final = (8, 9)
"""Lowest compute capability for which Triton converts to one-byte floats."""

TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Input dtypes of quantizer kernels; other dtypes are cast to FP32 first."""


@dataclass(frozen=True)
class Groups:
    """Memory as a matrix. `group`: 0 a single scale, 1 a scale per row, 2 a scale per column."""

    rows: int
    columns: int
    group: int


class QuantizerSite:
    """Call site of a quantizer kernel for tensors of one layout; see `launch.CallSite`."""

    def __init__(
        self,
        library: Library,
        x: Tensor,
        q: Tensor,
        row: Precision,
        rounding: Rounding,
        keep: Sequence[int],
        groups: Groups,
    ) -> None:
        self.library, self._device = library, x.device
        self._workspace: int | None = None
        self._q = tuple(map(int, q.shape)), tuple(map(int, q.stride())), q.dtype
        self._scale = [int(size) for size in reference.scale_shape(q, keep)]
        self._transpose = groups.columns, groups.rows
        stride = _stride(x, q, groups)
        self._copies = stride is None
        self._read = x.dtype if x.dtype in TYPES else torch.float32
        self._arguments = QuantizeArguments(
            rows=groups.rows, columns=groups.columns, ldx=stride or groups.columns,
            x_type=X_TYPES[str(format_name(self._read))],
            format=QUANTIZER_FORMATS[encoding(row).name], rounding=ROUNDINGS[rounding],
            group=groups.group, **launch_utils.device_arguments(x.device),
        )  # fmt: skip

    def __call__(
        self, x: Tensor, seed: Tensor, stream: int, transposed: bool
    ) -> tuple[Tensor, ...]:
        """Return `(q, scale)`, or `(q, transpose, scale)`; raise `KernelError` on failure."""
        shape, strides, dtype = self._q
        q = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        if not transposed:
            return q, self.fill(x, q, None, seed, stream)
        transpose = torch.empty(self._transpose, dtype=dtype, device=self._device)
        return q, transpose, self.fill(x, q, transpose, seed, stream)

    def fill(
        self, x: Tensor, q: Tensor, transpose: Tensor | None, seed: Tensor, stream: int
    ) -> Tensor:
        """Fill `q`, and its transpose if given, and return the scales (FP32)."""
        with launch_utils.guarded(self._device):
            # The names keep the copies alive until the kernel is queued.
            if self._copies:
                x = torch.empty_strided(*self._q[:2], dtype=self._read, device=x.device).copy_(x)
            scale = torch.empty(self._scale, dtype=torch.float32, device=self._device)
            seed = seed.to(self._device)
            arguments = QuantizeArguments.from_buffer_copy(self._arguments)
            arguments.x, arguments.q = x.data_ptr(), q.data_ptr()
            arguments.scale, arguments.seed = scale.data_ptr(), seed.data_ptr()
            arguments.stream = stream & 0xFFFFFFFF
            if transpose is not None:
                arguments.qt = transpose.data_ptr()
            if self._workspace is None:
                self._workspace = launch_utils.workspace(self.library, arguments)
            launch_utils.queue(self.library, arguments, self._workspace, self._device)
            return scale


def _stride(x: Tensor, q: Tensor, groups: Groups) -> int | None:
    """Return the row stride of `x` in the memory order of `q`; None if it differs."""
    if x.dtype not in TYPES:
        return None
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), q.stride(), strict=True)):
        return groups.columns
    by_rows = x.dim() == 2 and q.stride(1) == x.stride(1) == 1 and x.stride(0) >= x.shape[1]
    if by_rows and (groups.rows, groups.columns) == tuple(x.shape):
        return int(x.stride(0))
    return None


cached_quantizer_call: Final[CallCache[QuantizerSite]] = CallCache()


def quantize(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `(q, scale)` with `q * scale` near `x`, on a CUDA device; see `qsync::quantize`."""
    result: Any = _by_kernel(x, seed, stream, row, rounding, keep, transposed=False)
    if result is None:
        return reference.quantize(x, seed, stream, row, rounding, keep)
    return result  # type: ignore[no-any-return]


def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, row: Precision, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(q, transpose, scale)` of a matrix; see `qsync::quantize_transposed`."""
    result: Any = _by_kernel(x, seed, stream, row, rounding, (), transposed=True)
    if result is not None:
        return result  # type: ignore[no-any-return]
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
    site = cached_quantizer_call.get(key)
    if site is None:
        return None
    try:
        return site(x, seed, stream, transposed)
    except KernelError as error:
        launch_utils.failed(site.library, f"{_shown(x)} -> {fmt}", error)
        cached_quantizer_call.pop(key, None)
        return None


def _key(x: Tensor, fmt: str, rounding: str, keep: Sequence[int], transposed: bool) -> Key:
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
    unit, shown = _unit(x, row), f"{_shown(x)} -> {row}"
    if isinstance(unit, str):
        launch_utils.note(shown, unit)
        return None
    library = launch_utils.library(unit, x.device, shown)
    if library is None:
        return None
    groups = groups_of(q, keep)
    if transposed:
        groups = Groups(int(q.shape[0]), int(q.shape[1]), 0)
    if groups is None:
        launch_utils.note(shown, "the values of a group are not contiguous rows or columns")
        return None
    site = QuantizerSite(library, x, q, row, rounding, keep, groups)
    cached_quantizer_call.keep(_key(x, row.name, rounding, keep, transposed), site)
    return again(x, seed, stream, row.name, rounding, keep, transposed)


def _unit(x: Tensor, row: Precision) -> TranslationUnit | str:
    """Return the translation unit that quantizes `x` to a format, or why there is none."""
    result, target = known_of(x.device), written(row)
    source = format_name(x.dtype if x.dtype in TYPES else torch.float32)
    if result.arch is None or source is None:
        return result.reason
    if target is None:
        return f"qsync_fx has no quantization kernel for {row}"
    return quantizer(result.arch, source, target)


def fused(x: Tensor, row: Precision) -> bool:
    """Return whether a compiled graph should quantize `x` by fused operators: without a kernel."""
    empty = isinstance(x.numel(), int) and x.numel() == 0
    if empty or not compiles(row, x.device):
        return False
    unit = _unit(x, row)
    if isinstance(unit, str) or kernel_registry.failure(unit) is not None:
        return True
    return not (known_of(x.device).compiles or kernel_registry.stored(unit))


def compiles(row: Precision, device: torch.device) -> bool:
    """Return whether the compiler, which fuses operators, converts to a format on a device."""
    return not row.dtype.is_floating_point or capability(device) >= _FLOATS_OF_A_BYTE


def _shown(x: Tensor) -> str:
    return f"quantize {' x '.join(map(str, x.shape))} {format_name(x.dtype) or x.dtype}"


def groups_of(q: Tensor, keep: Sequence[int]) -> Groups | None:
    """Return the scale groups of a dense tensor as rows or columns of its memory, or None."""
    saved = []
    if q.dim():
        saved = [dim for dim in sorted({dim % q.dim() for dim in keep}) if q.shape[dim] != 1]
    order = sorted((dim for dim in range(q.dim()) if q.shape[dim] != 1), key=q.stride, reverse=True)
    total, number = q.numel(), math.prod(q.shape[dim] for dim in saved)
    if not total:
        return None
    if not saved:
        # One row if its length fits INT32, else one row per index of the outermost dimension.
        rows = 1
        if total > LARGEST_SIZE:
            rows = int(q.shape[order[0]])
        return Groups(rows, total // rows, 0)
    if order[: len(saved)] == saved:
        return Groups(number, total // number, 1)
    if order[-len(saved) :] == saved:
        return Groups(total // number, number, 2)
    return None


_warned: set[str] = set()


def warn_about_missing_kernels(device: torch.device) -> None:
    """Warn about the missing kernels of a device, once per process and message."""
    text = missing_kernels_message(device)
    if text and text not in _warned:
        _warned.add(text)
        warnings.warn(text, PlanWarning, stacklevel=2)


def missing_kernels_message(device: torch.device) -> str:
    """Return the warning about a device's missing kernels; "" if none are missing."""
    result = known_of(device)
    if result.mend is None or result.lacks is None:
        return ""
    name = "the GPU" if device.index is None else str(device)
    carriers = {row_on(device, row).carrier for row in FORMATS.values() if row.kind == "integer"}
    products = (
        "cuBLAS multiplies INT8 if it supports the sizes, and computes all other products in "
        f"INT8, FP8 and TF32 in {' and '.join(sorted(map(str, carriers)))}, at the same speed"
    )
    cost = (
        f"{products}; values are quantized by code that the compiler fuses, which draws eight "
        "times as many random numbers as the kernels of qsync_fx"
    )
    if not all(compiles(row, device) for row in FORMATS.values() if row.scaled):
        cost += (
            ", but to FP8 operator by operator, in about two hundred launches per tensor, because "
            "the compiler cannot convert to 8-bit floats for compute capability "
            + ".".join(map(str, capability(device)))
        )
    if result.arch is not None and result.compiles:
        cost = f"Only kernels for products are missing, except those compiled elsewhere: {products}"
    elif result.arch is not None:
        cost = f"Only kernels that were compiled before are available; for all others, {cost}"
    return (
        f"{name} runs without the kernels of qsync_fx: {result.lacks}. The numbers are the "
        f"same. {cost}. To fix this: {result.mend}"
    )
