"""What kernels are measured against: the same product by torch, as fast as torch computes it, and random operands for both.

Invariant: a peer does no more than a compiled graph without kernels does: one product in the best format that torch has for the operands,
and at most one pass over the result, since a compiler fuses scales, bias and rounding into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem, fallback
from qsync_fx.backend.cuda.problem.operands import type_of

_NARROW: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Operands:
    """Tensors of one problem, as `qsync::gemm` and `qsync::conv2d_product` take them."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None


def operands(problem: Problem, device: torch.device, generator: torch.Generator | None = None) -> Operands:
    """Returns random operands of a problem. Never zeros: a GPU that multiplies zeros draws less power and clocks higher."""

    def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, device=device, generator=generator)
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def positive(kind: str, shape: tuple[int, ...]) -> Tensor | None:
        if kind == "none":
            return None
        return torch.rand(shape if kind == "channel" else (), device=device, generator=generator) + 0.5

    a_type, b_type = type_of(problem.a), type_of(problem.b)
    if isinstance(problem, GemmProblem):
        m, n, k = problem.m, problem.n, problem.k
        a = values((m, k), a_type) if problem.a_major == "row" else values((k, m), a_type).t()
        b = values((k, n), b_type) if problem.b_major == "row" else values((n, k), b_type).t()
        scales = positive(problem.a_scale, (m, 1)), positive(problem.b_scale, (1, n))
        channels = n
    else:
        p, channels = problem, problem.k
        x, weight, y = (p.n, p.h, p.w, p.c), (p.k, p.r, p.s, p.c), (p.n, p.p, p.q, p.k)
        first, second = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
        a, b = values(first, a_type).permute(0, 3, 1, 2), values(second, b_type).permute(0, 3, 1, 2)
        scales = positive(p.a_scale, ()), positive(p.b_scale, (1, p.k, 1, 1))
    bias = torch.randn(channels, device=device, generator=generator) if problem.bias else None
    return Operands(a, b, *scales, bias)


def peer(problem: Problem, given: Operands) -> Callable[[], Tensor]:
    """Returns torch's product of operands, to be called; its result is in the problem's output format, its scales are."""
    product = _gemm(problem, given) if isinstance(problem, GemmProblem) else _conv(problem, given)
    out = type_of(problem.out)
    bare = given.a_scale is None and given.b_scale is None and given.bias is None

    def run() -> Tensor:
        total = product()
        if bare and total.dtype == out:
            return total
        # One pass: what it multiplies by does not matter for its time.
        return torch.mul(total, factor, out=torch.empty_like(total, dtype=out))

    scale = given.a_scale if given.a_scale is not None else given.b_scale
    factor = torch.ones((), device=given.a.device) if scale is None or scale.dim() else scale
    return run


def _gemm(problem: GemmProblem, given: Operands) -> Callable[[], Tensor]:
    a, b = given.a, given.b
    if a.dtype == torch.int8:
        if fallback.takes_integers(problem.m, problem.n, problem.k):
            return lambda: fallback.integer_product(a, b.t())
        return lambda: a.to(torch.bfloat16) @ b.to(torch.bfloat16)
    if a.dtype in _NARROW:
        if fallback.takes_fp8(a, b):
            one = torch.ones((), device=a.device)
            out = type_of(problem.out)
            return lambda: torch._scaled_mm(a, b, one, one, out_dtype=out)
        return lambda: a.to(torch.bfloat16) @ b.to(torch.bfloat16)
    return lambda: a @ b


def _conv(problem: ConvProblem, given: Operands) -> Callable[[], Tensor]:
    narrow = torch.bfloat16 if given.a.dtype.itemsize == 1 else given.a.dtype
    size = (problem.h, problem.w) if problem.operation == "dgrad" else (problem.r, problem.s)
    geometry = problem.stride, problem.padding, problem.dilation

    def run() -> Tensor:
        # Conversions are part of it: there are no convolutions of one byte.
        return fallback.convolve(given.a.to(narrow), given.b.to(narrow), size, geometry, problem.operation)

    return run


def differs(problem: Problem, found: Tensor, given: Operands) -> str:
    """Returns how a result differs from what the problem means beyond roundings; "" where it does not."""
    o = given
    if isinstance(problem, GemmProblem):
        want = fallback.gemm(o.a, o.b, o.a_scale, o.b_scale, o.bias, torch.float32)
    else:
        p = problem
        size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
        how = size, p.stride, p.padding, p.dilation, p.operation, torch.float32
        want = fallback.conv2d_product(o.a, o.b, o.a_scale, o.b_scale, o.bias, *how)
    largest = want.abs().amax()
    error = (found.float() - want).abs().amax()
    # The reference itself may have been rounded to BF16 on the way.
    if bool(error <= 0.02 * largest):
        return ""
    return f"it is off by {float(error / largest):.2g} of the largest value"
