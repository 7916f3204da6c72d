"""Convolutions that are two-dimensional ones in disguise, and why others are not.

Invariant: a mapping computes the same sums; what is returned says which, or is a clause that reports show as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qsync_fx.backend.cuda.problem.problem import ConvOperation, ConvProblem


def as_2d(
    operation: ConvOperation,
    x: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    transposed: bool = False,
    groups: int = 1,
    **formats: Any,
) -> ConvProblem | str:
    """Returns the problem of a product of `aten::convolution`, or why kernels of two-dimensional convolutions do not compute it.

    A 1-D convolution is a 2-D one of height 1: with channels last, its tensors lie in memory as they are.

    Args:
        operation: which of the three products.
        x: shape of the input, `[n, c, *size]`.
        weight: shape of the weight, `[k, c, *kernel]`.
        stride, padding, dilation: one number for each spatial dimension.
        transposed, groups: as in `aten::convolution`.
        formats: `a`, `b`, `out` and what else a ConvProblem has.
    """
    spatial = len(weight) - 2
    if transposed:
        return "transposed convolutions are computed by torch"
    if groups != 1:
        return "convolutions in groups are computed by torch: their products are too narrow for tensor cores"
    if spatial not in (1, 2):
        return f"{spatial}-D convolutions are computed by torch"
    one = spatial == 1
    (n, c, *size), (k, _, *kernel) = x, weight
    h, w = (1, *size) if one else size
    r, s = (1, *kernel) if one else kernel
    return ConvProblem(
        operation=operation,
        n=n,
        h=h,
        w=w,
        c=c,
        k=k,
        r=r,
        s=s,
        padding=(0, padding[0]) if one else (padding[0], padding[1]),
        stride=(1, stride[0]) if one else (stride[0], stride[1]),
        dilation=(1, dilation[0]) if one else (dilation[0], dilation[1]),
        **formats,
    )


def flipped(problem: ConvProblem) -> ConvProblem | str:
    """Returns the input gradient of a convolution of stride 1 as the output of another, or why it is none.

    Why: tensor cores take INT8 only contiguous along the sum, which an output's operands are and a gradient's are not. Its first operand
    is the gradient of the output as it is, its second the weight `[k, r, s, c]` as `[c, r, s, k]` with rows and columns in reverse:
    `weight.flip(1, 2).permute(3, 1, 2, 0).contiguous()`.
    """
    if problem.operation != "dgrad":
        return f"{problem.operation} is no input gradient"
    if problem.stride != (1, 1):
        return "the input gradient of a strided convolution is no convolution of what lies in memory"
    if problem.b_scale == "channel":
        return "the weight's scales vary along the sum"
    reach = problem.dilation[0] * (problem.r - 1), problem.dilation[1] * (problem.s - 1)
    padding = reach[0] - problem.padding[0], reach[1] - problem.padding[1]
    if min(padding) < 0:
        return "it is padded by more than its filter reaches"
    return replace(problem, operation="fprop", h=problem.p, w=problem.q, c=problem.k, k=problem.c, padding=padding)
