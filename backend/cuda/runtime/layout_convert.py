"""Layout conversion of operands by a copy kernel, with torch as the fallback.

torch copies byte by byte if strides differ, and zeroes memory before it copies into it. The kernel
reads once and writes once, 16 bytes at a time. Both produce the same bits; a numeric conversion
preserves NaN, but not its payload.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import CONVERT_TYPES, FLOATS, NUMBERS, TranslationUnit
from qsync_fx.backend.cuda.kernel_build.library import ConvertArguments, Library
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.problem import Major, padding
from qsync_fx.backend.cuda.problem.problem import format_name, leading
from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.cuda.runtime.device_state import known_of
from qsync_fx.errors import KernelError

NEITHER = "its values are neither row-major nor column-major"


@dataclass(frozen=True)
class StridedLines:
    """Matrices `[batches, rows, columns]` in memory, with strides in elements.

    `stride` is between rows, `batch_stride` between matrices. A copy transposes if `transposed`.
    """

    batches: int
    rows: int
    columns: int
    stride: int
    batch_stride: int
    transposed: bool


def lines_of(matrix: Tensor) -> StridedLines | None:
    """Return the layout of a matrix for a copy by rows; None if it is not row- or column-major."""
    rows, columns = map(int, matrix.shape)
    if (stride := leading(matrix, "row")) is not None:
        return StridedLines(1, rows, columns, stride, 0, transposed=False)
    if (stride := leading(matrix, "column")) is not None:
        return StridedLines(1, columns, rows, stride, 0, transposed=True)
    return None


def lines_of_images(t: Tensor) -> StridedLines | None:
    """Return the layout of images `[n, c, h, w]` for a channels-last copy, or None."""
    n, c, h, w = (int(size) for size in t.shape)
    # Flatten h and w into one pixel dimension if their strides allow it.
    by = [int(t.stride(dim)) for dim, size in ((2, h), (3, w)) if size > 1]
    if len(by) == 2 and by[0] != w * by[1]:
        return None
    pixels = h * w
    pixel, channel = by[-1] if by else 1, int(t.stride(1))
    batch = int(t.stride(0)) if n > 1 else 0
    # The stride of a dimension of size 1 is arbitrary: rows are then as long as they are wide.
    if c > 1 and channel == 1:
        stride = pixel if pixels > 1 else c
        if stride >= c:
            return StridedLines(n, pixels, c, stride, batch, transposed=False)
    if pixel == 1:
        stride = channel if c > 1 else pixels
        if stride >= pixels:
            return StridedLines(n, c, pixels, stride, batch, transposed=True)
    return None


def laid_out(matrix: Tensor, rows: int, columns: int, method: Major) -> Tensor:
    """Return a copy of a matrix; see `padding.laid_out`."""
    if method == "column":
        return laid_out(matrix.t(), columns, rows, "row").t()
    result = _copied(matrix, lines_of(matrix), (1, rows, columns))
    if result is None:
        return padding.laid_out(matrix, rows, columns, "row")
    return result[0]


def channels_last(t: Tensor, first: int, second: int) -> Tensor:
    """Return a copy of images; see `padding.channels_last`."""
    h, w = (int(size) for size in t.shape[2:])
    result = _copied(t, lines_of_images(t), (first, h * w, second))
    if result is None:
        return padding.channels_last(t, first, second)
    return result.view(first, h, w, second).permute(0, 3, 1, 2)


def convert(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, transposed: bool, shape: tuple[int, int]
) -> Tensor | None:
    """Return `qsync::convert` by a kernel; None, with a noted reason, for the torch fallback."""
    if transposed:
        x = x.t()
    result = _copied(x, lines_of(x), (1, *shape), dtype, scale)
    return result if result is None else result[0]


def _copied(
    t: Tensor,
    lines: StridedLines | None,
    shape: tuple[int, int, int],
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> Tensor | None:
    """Return a contiguous `[batches, rows, columns]` copy by a kernel; None for a noted reason."""
    dtype = dtype or t.dtype
    kinds, shown = kinds_of(t.dtype, dtype, scale is not None), _shown(t, dtype)
    device = known_of(t.device)
    if device.arch is None:
        launch_utils.note(shown, device.reason)
    elif lines is None:
        launch_utils.note(shown, NEITHER)
    elif kinds is None:
        launch_utils.note(shown, "there is no kernel for these types")
    elif library := launch_utils.library(unit_of(device.arch, kinds), t.device, shown):
        try:
            return run(library, t, lines, kinds, shape, dtype, scale)
        except KernelError as error:
            launch_utils.note(shown, error.what)
    return None


def kinds_of(source: torch.dtype, dtype: torch.dtype, scaled: bool) -> tuple[str, str] | None:
    """Return the element kinds of a copy, raw bits for equal dtypes; None without a kernel."""
    if source == dtype and not scaled:
        kind = f"bits{8 * source.itemsize}"
        return (kind, kind) if kind in CONVERT_TYPES and not source.is_complex else None
    number, result = format_name(source), format_name(dtype)
    if number in NUMBERS and result in FLOATS:
        return number, result
    return None


def unit_of(arch: Arch, kinds: tuple[str, str]) -> TranslationUnit:
    """Return the translation unit that converts between two element kinds."""
    if kinds[0].startswith("bits"):
        return codegen.copier(arch)
    return codegen.converter(arch, kinds[0])


def run(
    library: Library,
    t: Tensor,
    lines: StridedLines,
    kinds: tuple[str, str],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    scale: Tensor | None,
) -> Tensor:
    """Return a contiguous `[batches, rows, columns]` tensor that a kernel fills from `t`."""
    with launch_utils.guarded(t.device):
        y = t.new_empty(shape, dtype=dtype)
        arguments = ConvertArguments(
            x=t.data_ptr(), y=y.data_ptr(),
            batches=lines.batches, rows=lines.rows, columns=lines.columns, ldx=lines.stride,
            batch_stride=lines.batch_stride,
            y_batches=shape[0], y_rows=shape[1], y_columns=shape[2],
            x_type=CONVERT_TYPES[kinds[0]], y_type=CONVERT_TYPES[kinds[1]], turned=lines.transposed,
            **launch_utils.device_arguments(t.device),
        )  # fmt: skip
        if scale is not None:
            scale = scale.to(t.device)
            arguments.scale = scale.data_ptr()
        launch_utils.run(library, arguments, t.device)
    return y


def _shown(t: Tensor, dtype: torch.dtype) -> str:
    names = dict.fromkeys(format_name(kind) or str(kind) for kind in (t.dtype, dtype))
    return f"copy {' x '.join(map(str, t.shape))} {' -> '.join(names)}"
