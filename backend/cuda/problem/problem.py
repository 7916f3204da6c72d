"""Definition of GEMM and convolution problems: formats, layouts, sizes.

Invariant: a problem is a value without tensors or pointers. Calls with equal problems may run the
same kernel, and problems of one bucket share a tuning result.
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
        a, b: formats of the operands (names in `qsync_fx.formats`).
        out: format of `d`: "fp32", "fp16" or "bf16". `d` is row-major.
        a_major, b_major: layouts of `a` `[m, k]` and `b` `[k, n]`, row- or column-major. The weight
            `[n, k]` of a linear layer is a column-major `b`: both operands are then contiguous
            along k ("K-major"), as integer tensor cores require.
        a_scale: no scale, one per tensor, or one per row of `a`, FP32.
        b_scale: no scale, one per tensor, or one per column of `b`, FP32.
        bias: whether there is a bias, FP32 `[n]`.
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
    def flops(self) -> int:
        return 2 * self.n * self.p * self.q * self.k * self.r * self.s * self.c

    def bucket(self) -> ConvProblem:
        """Return the problem that represents this one in tuning.

        Only the batch size is rounded: models use few image sizes but many batch sizes.
        """
        return replace(self, n=bucketed(self.n))


Problem = GemmProblem | ConvProblem


def bucketed(size: int, steps: int = 4) -> int:
    """Return `size` rounded up to one of `steps` values per power of two.

    With four steps: 64, 80, 96, 112, 128, 160 and so on.
    """
    if size <= 2 * steps:
        return size
    unit = 1 << ((size - 1).bit_length() - 1 - (steps - 1).bit_length())
    return -(-size // unit) * unit
