"""Products of INT8 matrices, and of stacks of them, by the integer unit of torch: oneDNN's on the CPU, cuBLAS's on CUDA.

Invariant: sums are exact. Where INT32 does not hold every sum, or the unit saturates or does not take the sizes, there is no product.

`qsync::integer_products`: the product of two INT8 matrices, or the products of two stacks of them, by the CPU's unit for them.

Why opaque: torch multiplies a stack of INT8 matrices without the unit, and overflows; one by one, each would be a node of the graph. Of a
single product the transpose of the weight would be one: a view, in the eyes of a partitioner of joint graphs fused into what reads it, so
that the weight seemed dear to keep, and half of all layers, by how sizes round, kept a copy in BF16 in its place, twice as large.

Invariant: sums are exact, as those of `qsync_fx.backend.operators.gemm.int_mm`, which says when there are any.

`qsync::grouped_products`: the products of groups of rows, each with a matrix of its own, as the experts of a model are computed.

Why opaque: how many rows a group has only a run knows, and each group is a product of torch's.

Invariant: a group without rows costs nothing, and rows beyond the last group give zeros. Integers are summed exactly where torch has a unit
for it and INT32 holds every sum; all else is multiplied in the type that is asked for.
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
    """Returns `a @ bt.T` in INT32, each sum exact; None where torch has no such product.

    Args:
        a: `[M, K]`, any strides, or a stack `[E, M, K]`, which CUDA has no product for.
        bt: `[N, K]`, any strides, or a stack likewise.
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
    # `[S, K]` by `[E, K, N]` gives `[S, N]`; `[M, S]` by `[S, N]` gives `[E, M, N]`. `offs` has the end of each group in S.
    "grouped_products(Tensor a, Tensor b, Tensor offs, str a_format, str b_format, ScalarType dtype) -> Tensor",
    {"CPU": _grouped_compute},
    _grouped_fake,
)
