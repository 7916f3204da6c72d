"""Products of INT8 matrices, and of stacks of them, by the integer unit of torch: oneDNN's on the CPU, cuBLAS's on CUDA.

Invariant: sums are exact. Where INT32 does not hold every sum, or the unit saturates or does not take the sizes, there is no product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import fallback
from qsync_fx.devices import cpu_multiplies_integers
from qsync_fx.precision import Precision


def product(a: Tensor, bt: Tensor, formats: tuple[Precision, Precision]) -> Tensor | None:
    """Returns `a @ bt.T` in INT32, each sum exact; None where torch has no such product.

    Args:
        a: `[M, K]`, any strides, or a stack `[E, M, K]`, which CUDA has no product for.
        bt: `[N, K]`, any strides, or a stack likewise.
        formats: of `a` and `bt`.
    """
    if not summed_exactly(a.device, a.shape[-1], formats):
        return None
    if a.device.type == "cpu":
        found: Tensor = torch.ops.qsync.integer_products.default(a, bt)
        return found
    if a.dim() == 3:
        return None
    if a.device.type != "cuda":
        return torch._int_mm(strided(a), strided(bt).t())
    takes = fallback.takes_integers(a.shape[0], bt.shape[0], a.shape[1])
    return fallback.integer_product(a, bt) if takes else None


def summed_exactly(device: torch.device, inner: int, formats: tuple[Precision, Precision]) -> bool:
    """Whether an integer unit sums `inner` products of values of these formats, and INT32 holds every such sum."""
    if any(row.kind != "integer" or row.dtype != torch.int8 for row in formats):
        return False
    if inner * formats[0].max * formats[1].max >= 2**31:
        return False
    # oneDNN returns memory that nothing has written for a single one (seen in torch 2.13).
    return device.type != "cpu" or (inner != 1 and cpu_multiplies_integers())


def strided(t: Tensor) -> Tensor:
    """Returns a matrix that lies by columns, or by rows with the strides that its shape implies, as the CPU's unit takes it; else a copy.

    With one row any stride between rows is right, as of a transposed column; oneDNN takes it for the length of a row and reads beyond.
    """
    if t.is_contiguous():
        return t if t.stride(0) == t.shape[1] else t.flatten().view(t.shape)
    return t if t.t().is_contiguous() else t.contiguous()
