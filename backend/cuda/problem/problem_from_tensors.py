"""Problems from tensors: formats, layouts and sizes, and the alignment of operands.

Invariant: only metadata is read, so fake and meta tensors work. Row strides and pointer alignment
are not part of a problem: they decide whether an operand of a call is copied, not which problem it
is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem.problem import (
    ConvOperation,
    ConvProblem,
    GemmProblem,
    Major,
    Scale,
)
from qsync_fx.formats import FORMATS

LARGEST_SIZE: Final = 2**31 - 1
"""Sizes are INT32 in the C interface."""

_FORMATS: Final = {
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8_e5m2",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
OUTPUTS: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Outline:
    """Dtype, shape and strides of a tensor, which need not exist yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def dim(self) -> int:
        return len(self.shape)


def outline(t: Tensor, dtype: torch.dtype | None = None) -> Outline | None:
    """Return the outline of a tensor, as `dtype` if given; symbolic sizes use their hints.

    Return None if a size depends on data. No guard is installed: a decision based on the hint is
    valid for every size, and best for the hint.
    """
    shape, strides = [_number(size) for size in t.shape], [_number(stride) for stride in t.stride()]
    if None in shape or None in strides:
        return None
    return Outline(dtype or t.dtype, tuple(shape), tuple(strides))  # type: ignore[arg-type]


def _number(size: int | torch.SymInt) -> int | None:
    if isinstance(size, torch.SymInt):
        hint: Any = size.node.hint
        return hint if isinstance(hint, int) else None
    return size


def format_name(dtype: torch.dtype, tf32: bool = False) -> str | None:
    """Return the operand format of a dtype, "tf32" for FP32 if `tf32`; None if unsupported."""
    return "tf32" if tf32 and dtype == torch.float32 else _FORMATS.get(dtype)


def type_of(fmt: str) -> torch.dtype:
    """Return the storage dtype of a format."""
    return FORMATS[fmt].dtype


def gemm_problem(
    a: Tensor | Outline,
    b: Tensor | Outline,
    a_scale: Tensor | Outline | None,
    b_scale: Tensor | Outline | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tf32: bool,
) -> GemmProblem:
    """Return the problem of `qsync::gemm` for valid, non-empty operands with concrete sizes.

    An operand that is neither row- nor column-major counts as contiguous along k, the layout of its
    future copy.
    """
    return GemmProblem(
        m=int(a.shape[0]),
        n=int(b.shape[1]),
        k=int(a.shape[1]),
        a=_format(a, tf32),
        b=_format(b, tf32),
        out=_FORMATS[out_dtype],
        a_major=major(a, preferred="row") or "row",
        b_major=major(b, preferred="column") or "column",
        a_scale=scale_kind(a_scale),
        b_scale=scale_kind(b_scale),
        bias=bias is not None,
    )


@dataclass(frozen=True)
class ConvWindow:
    """Stride, padding and dilation of a convolution, for height and width; see `ConvProblem`."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def conv_problem(
    a: Tensor | Outline,
    b: Tensor | Outline,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    size: tuple[int, int],
    window: ConvWindow,
    operation: ConvOperation,
    out_dtype: torch.dtype,
    tf32: bool,
) -> ConvProblem:
    """Return the problem of `qsync::conv2d_product` with these operands; see `gemm_problem`."""
    first, second = [int(s) for s in a.shape], [int(s) for s in b.shape]
    match operation:
        case "fprop":  # x [n, c, h, w], weight [k, c, r, s]
            n, c, h, w = first
            k, _, r, s = second
        case "dgrad":  # gradient of y [n, k, p, q], weight [k, c, r, s]
            n, (k, c, r, s), (h, w) = first[0], second, size
        case "wgrad":  # gradient of y [n, k, p, q], x [n, c, h, w]
            (n, k), (_, c, h, w), (r, s) = first[:2], second, size
    return ConvProblem(
        operation, n, h, w, c, k, r, s, window.padding, window.stride, window.dilation,
        _format(a, tf32), _format(b, tf32), _FORMATS[out_dtype], scale_kind(a_scale),
        scale_kind(b_scale), bias is not None,
    )  # fmt: skip


def _format(t: Tensor | Outline, tf32: bool) -> str:
    result = format_name(t.dtype, tf32)
    assert result is not None, t.dtype
    return result


def scale_kind(scale: Tensor | Outline | None) -> Scale:
    """Return the granularity of a scale tensor."""
    return "none" if scale is None else "tensor" if scale.dim() == 0 else "channel"


def major(t: Tensor | Outline, preferred: Major = "row") -> Major | None:
    """Return the layout of a matrix, `preferred` if both apply; None if neither does."""
    methods: tuple[Major, Major] = ("row", "column") if preferred == "row" else ("column", "row")
    return next((method for method in methods if leading(t, method) is not None), None)


def leading(t: Tensor | Outline, method: Major) -> int | None:
    """Return the leading dimension of a row-major (column-major) matrix; None for another layout.

    It is the stride between rows (columns) in elements. For a single row (column), whose stride is
    arbitrary, it is the length.
    """
    outer, inner = (0, 1) if method == "row" else (1, 0)
    length = int(t.shape[inner])
    if length > 1 and t.stride(inner) != 1:
        return None
    if t.shape[outer] <= 1:
        return length
    stride = int(t.stride(outer))
    # Kernels do not accept overlapping rows, such as a broadcast.
    return stride if stride >= length else None


def aligned(t: Tensor, methods: Major, alignment: int) -> bool:
    """Return whether a matrix of this layout is aligned: start to 16 bytes, rows to `alignment`.

    Args:
        methods: the layout.
        alignment: in elements; the leading dimension must be a multiple of it.
    """
    stride = leading(t, methods)
    return t.data_ptr() % 16 == 0 and stride is not None and stride % alignment == 0


def too_large(*sizes: int) -> bool:
    """Return whether a size, or a product of sizes that a kernel counts in INT32, exceeds INT32."""
    return any(size > LARGEST_SIZE for size in sizes)
