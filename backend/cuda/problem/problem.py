"""GEMM and convolution problems (formats, layouts, sizes), and the problems of tensors.

A problem is a value: calls with equal problems may run the same kernel, and problems of one bucket
share a tuning result. Only metadata of tensors is read, so fake tensors work. Row strides and
pointer alignment decide whether an operand of a call is copied, not which problem it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, NamedTuple

import torch
from torch import Tensor

from qsync_fx.formats import FORMATS

Major = Literal["row", "column"]
Scale = Literal["none", "tensor", "channel"]
ConvOperation = Literal["fprop", "dgrad", "wgrad"]


@dataclass(frozen=True)
class GemmProblem:
    """`d[m, n] = sum_k a[m, k] * b[k, n] * a_scale[m] * b_scale[n] + bias[n]`, rounded to `out`.

    Attributes:
        m, n, k: sizes; at least 1.
        a, b: formats of the operands (names in `qsync_fx.formats`).
        out: format of `d`: "fp32", "fp16" or "bf16". `d` is row-major.
        a_major, b_major: layouts of `a` `[m, k]` and `b` `[k, n]`, row- or column-major. The weight
            `[n, k]` of a linear layer is a column-major `b`: both operands are then contiguous
            along k ("K-major"), as integer tensor cores require.
        a_scale, b_scale: no scale, one per tensor, or one per row of `a` (column of `b`), FP32.
        bias: whether there is a bias, FP32 `[n]`.
    """

    kind: ClassVar = "gemm"
    operation: ClassVar = "gemm"

    m: int
    n: int
    k: int
    a: str
    b: str
    out: str
    a_major: Major = "row"
    b_major: Major = "column"
    a_scale: Scale = "none"
    b_scale: Scale = "none"
    bias: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of `a`, `b` and `d`."""
        return (self.m, self.k), (self.k, self.n), (self.m, self.n)

    def bucket(self) -> GemmProblem:
        """Return the problem that represents this one in tuning: each size is `bucketed`."""
        return replace(self, m=bucketed(self.m), n=bucketed(self.n), k=bucketed(self.k))


@dataclass(frozen=True)
class ConvProblem:
    """A 2-D convolution, or its input or weight gradient; channels-last.

    Activations `x` are `[n, h, w, c]`, weights `[k, r, s, c]`, outputs `y` `[n, p, q, k]`. "fprop"
    computes y from (x, weight), "dgrad" the gradient of x from (gradient of y, weight), "wgrad" the
    gradient of the weight from (gradient of y, x); `a` and `b` are the formats of this pair in this
    order. The accumulator is multiplied by the scales; fprop may add a bias.

    Attributes:
        padding, stride, dilation: for height and width.
        b_scale: "channel", one scale per output channel, only for fprop.
    """

    kind: ClassVar = "conv"

    operation: ConvOperation
    n: int
    h: int
    w: int
    c: int
    k: int
    r: int
    s: int
    padding: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    a: str
    b: str
    out: str
    a_scale: Scale = "none"
    b_scale: Scale = "none"
    bias: bool = False

    @property
    def p(self) -> int:
        return self._places(self.h, self.r, 0)

    @property
    def q(self) -> int:
        return self._places(self.w, self.s, 1)

    def _places(self, size: int, window: int, dim: int) -> int:
        reach = self.dilation[dim] * (window - 1)
        return (size + 2 * self.padding[dim] - reach - 1) // self.stride[dim] + 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the two operands and the result, channels last."""
        x = self.n, self.h, self.w, self.c
        weight = self.k, self.r, self.s, self.c
        y = self.n, self.p, self.q, self.k
        match self.operation:
            case "fprop":
                return x, weight, y
            case "dgrad":
                return y, weight, x
            case "wgrad":
                return y, x, weight

    @property
    def flops(self) -> int:
        return 2 * self.n * self.p * self.q * self.k * self.r * self.s * self.c

    def bucket(self) -> ConvProblem:
        """Return the problem that represents this one in tuning: its batch size is `bucketed`."""
        return replace(self, n=bucketed(self.n))


Problem = GemmProblem | ConvProblem


def bucketed(size: int, steps: int = 4) -> int:
    """Return `size` rounded up to one of `steps` values per power of two: 64, 80, 96, 112, 128."""
    if size <= 2 * steps:
        return size
    unit = 1 << ((size - 1).bit_length() - 1 - (steps - 1).bit_length())
    return -(-size // unit) * unit


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
    """Return the outline of a tensor, as `dtype` if given; None if a size depends on data.

    Symbolic sizes use their hints without a guard: decisions by them are valid for every size.
    """
    shape, strides = sizes_of(t.shape), sizes_of(t.stride())
    if shape is None or strides is None:
        return None
    return Outline(dtype or t.dtype, shape, strides)


def sizes_of(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    """Return sizes, the hints of symbolic ones; None if one depends on data."""
    result = []
    for size in sizes:
        number: Any = size
        if isinstance(size, torch.SymInt):
            number = size.node.hint
        if not isinstance(number, int):
            return None
        result.append(number)
    return tuple(result)


def format_name(dtype: torch.dtype, tf32: bool = False) -> str | None:
    """Return the operand format of a dtype, "tf32" for FP32 if `tf32`; None if unsupported."""
    if tf32 and dtype == torch.float32:
        return "tf32"
    return _FORMATS.get(dtype)


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
    copy. `a` and `b` are outlines of the operands that will replace `x.a` and `x.b`.
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
    if scale is None:
        return "none"
    return "channel" if scale.dim() else "tensor"


def major(t: Tensor | Outline, preferred: Major = "row") -> Major | None:
    """Return the layout of a matrix, `preferred` if both apply; None if neither does."""
    methods: tuple[Major, ...] = (preferred, "row", "column")
    return next((method for method in methods if leading(t, method) is not None), None)


def leading(t: Tensor | Outline, method: Major) -> int | None:
    """Return the elements between rows (columns) of a row-major (column-major) matrix, or None.

    The stride of a single row (column) is arbitrary, so the length is returned.
    """
    outer, inner = {"row": (0, 1), "column": (1, 0)}[method]
    length = int(t.shape[inner])
    if length > 1 and t.stride(inner) != 1:
        return None
    if t.shape[outer] <= 1:
        return length
    stride = int(t.stride(outer))
    # Kernels do not accept overlapping rows, such as a broadcast.
    return stride if stride >= length else None


def aligned(t: Tensor, methods: Major, alignment: int) -> bool:
    """Return whether a matrix of this layout starts at 16 bytes, its rows at `alignment` values."""
    stride = leading(t, methods)
    return t.data_ptr() % 16 == 0 and stride is not None and stride % alignment == 0


def too_large(*sizes: int) -> bool:
    """Return whether a size, or a product of sizes that a kernel counts in INT32, exceeds INT32."""
    return any(size > LARGEST_SIZE for size in sizes)
