"""`qsync::grouped_products`: the products of groups of rows, each with a matrix of its own, as the experts of a model are computed.

Why opaque: how many rows a group has only a run knows, and each group is a product of torch's.

Invariant: a group without rows costs nothing, and rows beyond the last group give zeros. Integers are summed exactly where torch has a unit
for it and INT32 holds every sum; all else is multiplied in the type that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.multiplying import integers
from qsync_fx.precision import Precision, precision


def _groups(offs: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for at, end in enumerate(offs.tolist()):
        if end > start:
            yield at, slice(start, end)
        start = end


def _product(a: Tensor, b: Tensor, formats: tuple[Precision, Precision], dtype: torch.dtype) -> Tensor:
    exact = integers.product(a, b.t(), formats)
    return a.to(dtype) @ b.to(dtype) if exact is None else exact


def _compute(a: Tensor, b: Tensor, offs: Tensor, a_format: str, b_format: str, dtype: torch.dtype) -> Tensor:
    formats = precision(a_format), precision(b_format)
    if b.dim() == 3:
        found = torch.zeros(a.shape[0], b.shape[2], dtype=dtype)
        for at, rows in _groups(offs):
            found[rows] = _product(a[rows], b[at], formats, dtype)
        return found
    found = torch.zeros(offs.shape[0], a.shape[0], b.shape[1], dtype=dtype)
    for at, rows in _groups(offs):
        found[at] = _product(a[:, rows], b[rows], formats, dtype)
    return found


def _fake(a: Tensor, b: Tensor, offs: Tensor, a_format: str, b_format: str, dtype: torch.dtype) -> Tensor:
    shape = (a.shape[0], b.shape[2]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape, dtype=dtype)


define(
    # `[S, K]` by `[E, K, N]` gives `[S, N]`; `[M, S]` by `[S, N]` gives `[E, M, N]`. `offs` has the end of each group in S.
    "grouped_products(Tensor a, Tensor b, Tensor offs, str a_format, str b_format, ScalarType dtype) -> Tensor",
    {"CPU": _compute},
    _fake,
)
