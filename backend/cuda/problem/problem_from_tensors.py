"""From tensors to a problem: formats, layouts and sizes, and what memory says beyond them.

Invariant: nothing here reads a value or touches a device, so fake and meta tensors do. What a problem does not hold (strides between rows,
where a pointer starts) is a fact of one call and decides whether an operand has to be copied, never which problem it is.
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
    """What a problem takes of a tensor: type, shape and strides, as numbers. It stands for tensors that are not made yet."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def dim(self) -> int:
        return len(self.shape)


def outline(t: Tensor, dtype: torch.dtype | None = None) -> Outline | None:
    """Returns the outline of a tensor, as `dtype` if given; with symbolic sizes, that of the example that is traced with.

    None where a size depends on values. No guard is made: what is decided by it holds for any size, and is best for this one.
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
    """Returns the format of operands of a type, which for FP32 may be "tf32"; None for types that products do not take."""
    return "tf32" if tf32 and dtype == torch.float32 else _FORMATS.get(dtype)


def type_of(fmt: str) -> torch.dtype:
    """Returns the type that operands in a format are kept in."""
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
    """Returns the problem of `qsync::gemm` with these operands, which are valid, have sizes that are numbers, and at least one value.

    An operand that lies neither by rows nor by columns is given as one that is contiguous along k, which a copy of it will be.
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
    """How a convolution's kernel moves, for height and width; see ConvProblem."""

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
    """Returns the problem of `qsync::conv2d_product` with these operands; see `gemm_problem`."""
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
        _format(a, tf32), _format(b, tf32), _FORMATS[out_dtype], scale_kind(a_scale), scale_kind(b_scale), bias is not None,
    )  # fmt: skip


def _format(t: Tensor | Outline, tf32: bool) -> str:
    result = format_name(t.dtype, tf32)
    assert result is not None, t.dtype
    return result


def scale_kind(scale: Tensor | Outline | None) -> Scale:
    """Returns how many scales there are, as problems say it."""
    return "none" if scale is None else "tensor" if scale.dim() == 0 else "channel"


def major(t: Tensor | Outline, preferred: Major = "row") -> Major | None:
    """Returns how a matrix lies in memory, `preferred` where both are so; None where it lies neither way."""
    methods: tuple[Major, Major] = ("row", "column") if preferred == "row" else ("column", "row")
    return next((method for method in methods if leading(t, method) is not None), None)


def leading(t: Tensor | Outline, method: Major) -> int | None:
    """Returns the stride in elements between rows (columns) of a matrix that lies by rows (columns); None if it does not.

    Of a single row any stride is right, so it is given the one that its length implies.
    """
    outer, inner = (0, 1) if method == "row" else (1, 0)
    length = int(t.shape[inner])
    if length > 1 and t.stride(inner) != 1:
        return None
    if t.shape[outer] <= 1:
        return length
    stride = int(t.stride(outer))
    # Rows that overlap (a broadcast) are no matrix to a kernel.
    return stride if stride >= length else None


def aligned(t: Tensor, methods: Major, alignment: int) -> bool:
    """Whether a matrix that lies so starts at a multiple of 16 bytes, and its rows (columns) at multiples of `alignment` elements."""
    stride = leading(t, methods)
    return t.data_ptr() % 16 == 0 and stride is not None and stride % alignment == 0


def too_large(*sizes: int) -> bool:
    """Whether a size, or a product of sizes that a kernel counts in INT32, is beyond INT32."""
    return any(size > LARGEST_SIZE for size in sizes)
