"""What the CUDA kernels compute, on the CPU: exact sums, then the epilogue with its roundings in
their order.

Invariant: INT8 is equal to a correct kernel to the last bit for every tile, split and order, since
    integer sums do not depend on it. Floating-point sums are the exact ones rounded once to FP32: a
    kernel, which rounds as it goes, is within `float_bound` of them.
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
    """Returns `a @ b * a_scale * b_scale + bias` as a kernel of cpp/cutlass computes it.

    Args:
        a: `[m, k]`, INT8, FP8, FP16, BF16 or FP32 (TF32 too: values that it has).
        b: `[k, n]`.
        a_scale: FP32, `[]`, or `[m]` or `[m, 1]`.
        b_scale: FP32, `[]`, or `[n]` or `[1, n]`.
        bias: FP32 `[n]`.
    """
    rows = None if a_scale is None else a_scale.reshape(-1, 1)
    columns = None if b_scale is None else b_scale.reshape(1, -1)
    return finish(accumulated(a, b), rows, columns, bias, out)


def accumulated(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sums of products `[m, n]` in FP32: of INT8 as INT32 converts to it, of others
    exact but for one rounding.
    """
    if a.dtype == torch.int8:
        sums = torch.mm(a.long(), b.long())
        assert int(sums.abs().max()) <= LARGEST_INT32 if sums.numel() else True, (
            "kernels refuse a k for which this can be"
        )
        return sums.to(torch.int32).float()
    # Products of two FP32 numbers are exact in FP64, and so is a sum of a few; the rest is far
    # below FP32's last bit.
    return torch.mm(a.double(), b.double()).float()


def finish(
    sums: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out: torch.dtype,
) -> Tensor:
    """Returns FP32 `sums` with scales and bias, rounded to `out`:
    cpp/cutlass/epilogue/epilogue.cuh, step by step.

    Args:
        sums: `[..., n]`; scales and bias broadcast against it. None is scale 1 and bias 0.
    """
    y = sums * (1.0 if a_scale is None else a_scale)
    y = fma(
        y, torch.ones(()) if b_scale is None else b_scale, torch.zeros(()) if bias is None else bias
    )
    return y.to(out)


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Returns `x * y + z` for FP32 tensors with one rounding, as the device's instruction does.

    The product is exact in FP64. The sum is rounded to odd there, so that rounding it once more, to
    FP32, gives the right neighbour (Boldo and Melquiond 2008, Emulation of FMA and correctly
    rounded sums, theorem 2).
    """
    product, z = torch.broadcast_tensors(x.double() * y.double(), z.double())
    total = product + z
    # What the addition lost, exactly (Knuth's two-sum).
    part = total - product
    lost = (product - (total - part)) + (z - part)
    bits = total.view(torch.int64)
    inexact = torch.isfinite(total) & (lost != 0) & (bits % 2 == 0)
    # Towards what was lost: away from zero where both have one sign.
    step = torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64).float()


def float_bound(a: Tensor, b: Tensor) -> Tensor:
    """Returns how far `[m, n]` a kernel's FP32 sums may be from `accumulated`: k roundings of sums
    of magnitudes (Higham 2002, 3.1).

    Tensor cores add in blocks and truncate, which costs up to two units in the last place a step in
    place of half a unit.
    """
    k = a.shape[1]
    magnitudes = torch.mm(a.double().abs(), b.double().abs())
    return (k + 1) * 2.0**-22 * magnitudes + 2.0**-126
