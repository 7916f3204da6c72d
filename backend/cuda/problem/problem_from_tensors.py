"""Problems from tensors: formats, layouts and sizes, and the alignment of operands.

Invariant: only metadata is read, so fake and meta tensors work. Row strides and pointer alignment
are not part of a problem: they decide whether an operand of a call is copied, not which problem it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

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
    shape, strides = sizes_of(t.shape), sizes_of(t.stride())
    if shape is None or strides is None:
        return None
    return Outline(dtype or t.dtype, shape, strides)


def sizes_of(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    """Return sizes, the hints of symbolic ones; None if one depends on data."""
    result = []
    for size in sizes:
        number: Any = size.node.hint if isinstance(size, torch.SymInt) else size
        if not isinstance(number, int):
            return None
        result.append(number)
    return tuple(result)


def format_name(dtype: torch.dtype, tf32: bool = False) -> str | None:
    """Return the operand format of a dtype, "tf32" for FP32 if `tf32`; None if unsupported."""
    return "tf32" if tf32 and dtype == torch.float32 else _FORMATS.get(dtype)


def type_of(fmt: str) -> torch.dtype:
    """Return the storage dtype of a format."""
    return FORMATS[fmt].dtype


class GemmProduct(NamedTuple):
    """Arguments of `qsync::gemm`, which describes them."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype = torch.float32
    tf32: bool = False


class ConvProduct(NamedTuple):
    """Arguments of `qsync::conv2d_product`, which describes them."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None
    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    operation: ConvOperation
    out_dtype: torch.dtype = torch.float32
    tf32: bool = False


def gemm_problem(x: GemmProduct, a: Outline | None = None, b: Outline | None = None) -> GemmProblem:
    """Return the problem of a valid, non-empty product with concrete sizes.

    An operand that is neither row- nor column-major counts as contiguous along k, the layout of its
    future copy.

    Args:
        a, b: outlines of the operands, if they will differ from `x.a` and `x.b`.
    """
    first, second = a or x.a, b or x.b
    return GemmProblem(
        m=int(first.shape[0]),
        n=int(second.shape[1]),
        k=int(first.shape[1]),
        a=_format(first, x.tf32),
        b=_format(second, x.tf32),
        out=_FORMATS[x.out_dtype],
        a_major=major(first, preferred="row") or "row",
        b_major=major(second, preferred="column") or "column",
        a_scale=scale_kind(x.a_scale),
        b_scale=scale_kind(x.b_scale),
        bias=x.bias is not None,
    )


def conv_problem(x: ConvProduct, a: Outline | None = None, b: Outline | None = None) -> ConvProblem:
    """Return the problem of a convolution product; see `gemm_problem`."""
    first, second = a or x.a, b or x.b
    batch, rows, *image = map(int, first.shape)
    columns, channels, *other = map(int, second.shape)
    height, width = map(int, x.size)
    match x.operation:
        case "fprop":  # x [n, c, h, w], weight [k, c, r, s]
            n, (h, w), c, k, (r, s) = batch, image, rows, columns, other
        case "dgrad":  # gradient of y [n, k, p, q], weight [k, c, r, s]
            n, (h, w), c, k, (r, s) = batch, (height, width), channels, rows, other
        case "wgrad":  # gradient of y [n, k, p, q], x [n, c, h, w]
            n, (h, w), c, k, (r, s) = batch, other, channels, rows, (height, width)
    return ConvProblem(
        x.operation, n, h, w, c, k, r, s, _pair(x.padding), _pair(x.stride), _pair(x.dilation),
        _format(first, x.tf32), _format(second, x.tf32), _FORMATS[x.out_dtype],
        scale_kind(x.a_scale), scale_kind(x.b_scale), x.bias is not None,
    )  # fmt: skip


def _pair(sizes: Sequence[int]) -> tuple[int, int]:
    height, width = sizes
    return int(height), int(width)


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
