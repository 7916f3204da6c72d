"""What a kernel is to compute: formats, layouts, sizes.

Invariant: a problem is a value, without tensors or pointers. Two calls with equal problems may run the same kernel, and problems of one
bucket are tuned together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

Major = Literal["row", "column"]
Scale = Literal["none", "tensor", "channel"]
ConvOperation = Literal["fprop", "dgrad", "wgrad"]


@dataclass(frozen=True)
class GemmProblem:
    """`d[m, n] = sum_k a[m, k] * b[k, n] * a_scale[m] * b_scale[n] + bias[n]`, rounded to `out`.

    Attributes:
        m, n, k: sizes; at least 1.
        a, b: formats (names in `qsync_fx.formats`) of the operands.
        out: format of `d`: "fp32", "fp16" or "bf16". `d` is row-major.
        a_major, b_major: how `a` `[m, k]` and `b` `[k, n]` lie in memory: by rows or by columns. A linear layer's weight `[n, k]` is
            a `b` that lies by columns: both operands are then contiguous along k ("K-major"), which integer tensor cores want.
        a_scale: no scale, one, or one a row of `a`, FP32.
        b_scale: no scale, one, or one a column of `b`, FP32.
        bias: whether there is one, FP32 `[n]`.
    """

    kind: ClassVar = "gemm"

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

    def bucket(self) -> GemmProblem:
        """Returns the problem that stands for this one in tuning: each size at the next of `steps` a power of two."""
        return replace(self, m=bucketed(self.m), n=bucketed(self.n), k=bucketed(self.k))


@dataclass(frozen=True)
class ConvProblem:
    """A two-dimensional convolution's output, input gradient or weight gradient; channels last in memory.

    Activations `x` are `[n, h, w, c]`, weights `[k, r, s, c]`, outputs `y` `[n, p, q, k]`. "fprop" computes y from (x, weight), "dgrad"
    the gradient of x from (gradient of y, weight), "wgrad" the gradient of the weight from (gradient of y, x); `a` and `b` are the
    formats of that pair in that order. The accumulator is multiplied by the scales, and a bias is added (fprop only).

    Attributes:
        padding, stride, dilation: for height and width.
        b_scale: "channel" for fprop only: one scale an output channel.
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
        return (self.h + 2 * self.padding[0] - self.dilation[0] * (self.r - 1) - 1) // self.stride[
            0
        ] + 1

    @property
    def q(self) -> int:
        return (self.w + 2 * self.padding[1] - self.dilation[1] * (self.s - 1) - 1) // self.stride[
            1
        ] + 1

    @property
    def flops(self) -> int:
        return 2 * self.n * self.p * self.q * self.k * self.r * self.s * self.c

    def bucket(self) -> ConvProblem:
        """Returns the problem that stands for this one in tuning. Only the batch is rounded: images come in few sizes, batches in many."""
        return replace(self, n=bucketed(self.n))


Problem = GemmProblem | ConvProblem


def bucketed(size: int, steps: int = 4) -> int:
    """Returns `size` rounded up to one of `steps` values between powers of two: with four, 64, 80, 96, 112, 128, 160 and so on."""
    if size <= 2 * steps:
        return size
    unit = 1 << ((size - 1).bit_length() - 1 - (steps - 1).bit_length())
    return -(-size // unit) * unit
