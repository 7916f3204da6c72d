"""`qsync::embedding_gradient`: the gradient of an embedding's table by torch's kernel, which adds whole rows.

Why an operator of its own: Inductor's scatter adds one value at a time, each behind a mask; it has a formula for torch's operator, and so
lets no kernel be called in its place.

Invariant: the values of `aten::embedding_dense_backward`; sums of types of 16 bits are in FP32, and rounded once.
"""

from __future__ import annotations

import torch
from torch import SymInt, Tensor

from qsync_fx.backend.operators.library import define


def embedding_gradient(
    gradient: Tensor, indices: Tensor, rows: int | SymInt, padding: int | SymInt, by_frequency: bool
) -> Tensor:
    """Adds each row of `gradient` to that of a table which its index names.

    Args:
        gradient: `[*indices.shape, D]`, floating point.
        indices: int32 or int64, any shape.
        rows: of the table.
        padding: the row that gets nothing; -1 for none.
        by_frequency: divides what a row gets by how often it is named.

    Returns:
        `[rows, D]`, of `gradient`'s type.
    """
    found: Tensor = torch.ops.qsync.embedding_gradient.default(gradient, indices, rows, padding, by_frequency)
    return found


def _kernel(gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool) -> Tensor:
    wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient
    summed: Tensor = torch.ops.aten.embedding_dense_backward.default(wide, indices, rows, padding, by_frequency)
    return summed.to(gradient.dtype)


def _fake(gradient: Tensor, indices: Tensor, rows: int | SymInt, padding: int | SymInt, by_frequency: bool) -> Tensor:
    return gradient.new_empty((rows, gradient.shape[-1]))


define(
    "embedding_gradient(Tensor gradient, Tensor indices, SymInt rows, SymInt padding, bool by_frequency) -> Tensor",
    {"CompositeExplicitAutograd": _kernel},
    _fake,
)
