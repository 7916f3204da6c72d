"""Emulate the CUDA kernels on the CPU: exact sums, then the epilogue with its roundings in order.

Invariant: INT8 results equal a correct kernel bit for bit for any tile, split and order, because
integer sums are exact. Floating-point sums are exact and rounded once to FP32: a kernel, which
rounds each sum, is within `float_bound` of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_INT32 = 2**31 - 1


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out: torch.dtype = torch.float32,
) -> Tensor:
    """Return `a @ b * a_scale * b_scale + bias` as computed by a kernel of cpp/cutlass.

    Args:
        a: `[m, k]`, INT8, FP8, FP16, BF16 or FP32 (also for values in TF32).
        b: `[k, n]`.
        a_scale: FP32, `[]`, `[m]` or `[m, 1]`.
        b_scale: FP32, `[]`, `[n]` or `[1, n]`.
        bias: FP32 `[n]`.
    """
    rows = None if a_scale is None else a_scale.reshape(-1, 1)
    columns = None if b_scale is None else b_scale.reshape(1, -1)
    return finish(accumulated(a, b), rows, columns, bias, out)


def accumulated(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of products `[m, n]` in FP32: converted from INT32, or rounded once."""
    if a.dtype == torch.int8:
        sums = torch.mm(a.long(), b.long())
        assert int(sums.abs().max()) <= LARGEST_INT32 if sums.numel() else True, (
            "kernels reject a k for which INT32 sums can overflow"
        )
        return sums.to(torch.int32).float()
    # Products of two FP32 numbers and sums of a few are exact in FP64; errors of longer sums are
    # far below the last bit of FP32.
    return torch.mm(a.double(), b.double()).float()


def finish(
    sums: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    """Return FP32 `sums` with scales and bias, rounded to `out`, as
    cpp/cutlass/epilogue/epilogue.cuh.

    Args:
        sums: `[..., n]`; scales and bias broadcast to it. None is scale 1 and bias 0.
    """
    y = sums * (1.0 if a_scale is None else a_scale)
    y = fma(
        y, torch.ones(()) if b_scale is None else b_scale, torch.zeros(()) if bias is None else bias
    )
    return y.to(out)


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return `x * y + z` for FP32 tensors with one rounding, like the device's instruction.

    The product is exact in FP64. The sum is rounded to odd there, so that rounding it to FP32 is
    correct (Boldo and Melquiond 2008, Emulation of FMA and correctly rounded sums, theorem 2).
    """
    product, z = torch.broadcast_tensors(x.double() * y.double(), z.double())
    total = product + z
    # Exact error of the addition (Knuth's two-sum).
    part = total - product
    lost = (product - (total - part)) + (z - part)
    bits = total.view(torch.int64)
    inexact = torch.isfinite(total) & (lost != 0) & (bits % 2 == 0)
    # Away from zero if the error and the sum have the same sign.
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64).float()


def float_bound(a: Tensor, b: Tensor) -> Tensor:
    """Return the bound `[m, n]` of a kernel's error in FP32 sums (Higham 2002, 3.1).

    It allows k roundings of sums of magnitudes. Tensor cores add in blocks and truncate, so a step
    may cost two units in the last place instead of half a unit.
    """
    k = a.shape[1]
    magnitudes = torch.mm(a.double().abs(), b.double().abs())
    return (k + 1) * 2.0**-22 * magnitudes + 2.0**-126
