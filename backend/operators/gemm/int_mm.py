"""INT8 matrix products by torch's integer unit: oneDNN on the CPU, cuBLAS on CUDA.

`qsync::integer_products` multiplies two INT8 matrices or two stacks on the CPU. It is opaque: torch
multiplies stacks without the unit, and overflows; separate products would each be a graph node. The
second operand is passed transposed for the reason in `gemm`.

`qsync::grouped_products` multiplies each group of rows by its own matrix (mixture of experts). It
is opaque because group sizes are known at run time only. Empty groups are skipped; rows beyond the
last group give zeros.

Invariant: integer sums are exact. If INT32 cannot represent every sum, or the unit saturates or
rejects the sizes, `product` returns None.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.operators.registration import define
from qsync_fx.devices.cpu_features import cpu_multiplies_integers
from qsync_fx.formats import Precision, precision


def product(a: Tensor, bt: Tensor, formats: tuple[Precision, Precision]) -> Tensor | None:
    """Return `a @ bt.T` in INT32, each sum exact; None if torch has no such product.

    Args:
        a: `[M, K]`, any strides, or on the CPU a stack `[E, M, K]`.
        bt: `[N, K]` or `[E, N, K]`, any strides.
        formats: of `a` and `bt`.
    """
    if not summed_exactly(a.device, a.shape[-1], formats):
        return None
    if a.device.type == "cpu":
        result: Tensor = torch.ops.qsync.integer_products.default(a, bt)
        return result
    if a.dim() == 3:
        return None
    if a.device.type != "cuda":
        return torch._int_mm(strided(a), strided(bt).t())
    takes = reference_result.takes_integers(a.shape[0], bt.shape[0], a.shape[1])
    return reference_result.integer_product(a, bt) if takes else None


def summed_exactly(device: torch.device, inner: int, formats: tuple[Precision, Precision]) -> bool:
    """Return whether an integer unit sums `inner` products of two formats exactly in INT32."""
    if any(row.kind != "integer" or row.dtype != torch.int8 for row in formats):
        return False
    if inner * formats[0].max * formats[1].max >= 2**31:
        return False
    # With K = 1 oneDNN returns uninitialized memory (torch 2.13).
    return device.type != "cpu" or (inner != 1 and cpu_multiplies_integers())


def strided(t: Tensor) -> Tensor:
    """Return a matrix, copied unless column-major or row-major and dense, for the CPU's unit.

    oneDNN uses the row stride as the row length even with a single row, where any stride is valid,
    and reads beyond the end.
    """
    if t.is_contiguous():
        return t if t.stride(0) == t.shape[1] else t.flatten().view(t.shape)
    return t if t.t().is_contiguous() else t.contiguous()


def _compute(a: Tensor, bt: Tensor) -> Tensor:
    if a.dim() == 2:
        return torch._int_mm(strided(a), strided(bt).t())
    result = torch.empty((*a.shape[:-1], bt.shape[-2]), dtype=torch.int32)
    for item, other, into in zip(a, bt, result, strict=True):
        torch._int_mm(strided(item), strided(other).t(), out=into)
    return result


def _fake(a: Tensor, bt: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], bt.shape[-2]), dtype=torch.int32)


define("integer_products(Tensor a, Tensor bt) -> Tensor", {"CPU": _compute}, _fake)


def _groups(offs: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for index, end in enumerate(offs.tolist()):
        if end > start:
            yield index, slice(start, end)
        start = end


def _product(
    a: Tensor, b: Tensor, formats: tuple[Precision, Precision], dtype: torch.dtype
) -> Tensor:
    exact = product(a, b.t(), formats)
    return a.to(dtype) @ b.to(dtype) if exact is None else exact


def _grouped_compute(
    a: Tensor, b: Tensor, offs: Tensor, a_format: str, b_format: str, dtype: torch.dtype
) -> Tensor:
    formats = precision(a_format), precision(b_format)
    if b.dim() == 3:
        result = torch.zeros(a.shape[0], b.shape[2], dtype=dtype)
        for index, rows in _groups(offs):
            result[rows] = _product(a[rows], b[index], formats, dtype)
        return result
    result = torch.zeros(offs.shape[0], a.shape[0], b.shape[1], dtype=dtype)
    for index, rows in _groups(offs):
        result[index] = _product(a[:, rows], b[rows], formats, dtype)
    return result


def _grouped_fake(
    a: Tensor, b: Tensor, offs: Tensor, a_format: str, b_format: str, dtype: torch.dtype
) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=dtype)


define(
    # `[S, K]` by `[E, K, N]` gives `[S, N]`; `[M, S]` by `[S, N]` gives `[E, M, N]`. `offs` is the
    # end of each group in S.
    "grouped_products(Tensor a, Tensor b, Tensor offs, str a_format, str b_format, ScalarType dtype) -> Tensor",
    {"CPU": _grouped_compute},
    _grouped_fake,
)
