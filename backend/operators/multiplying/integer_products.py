"""`qsync::integer_products`: the product of two INT8 matrices, or the products of two stacks of them, by the CPU's unit for them.

Why opaque: torch multiplies a stack of INT8 matrices without the unit, and overflows; one by one, each would be a node of the graph. Of a
single product the transpose of the weight would be one: a view, in the eyes of a partitioner of joint graphs fused into what reads it, so
that the weight seemed dear to keep, and half of all layers, by how sizes round, kept a copy in BF16 in its place, twice as large.

Invariant: sums are exact, as those of `qsync_fx.backend.operators.multiplying.integers`, which says when there are any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.multiplying import integers


def _compute(a: Tensor, bt: Tensor) -> Tensor:
    if a.dim() == 2:
        return torch._int_mm(integers.strided(a), integers.strided(bt).t())
    found = torch.empty((*a.shape[:-1], bt.shape[-2]), dtype=torch.int32)
    for one, other, into in zip(a, bt, found, strict=True):
        torch._int_mm(integers.strided(one), integers.strided(other).t(), out=into)
    return found


def _fake(a: Tensor, bt: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], bt.shape[-2]), dtype=torch.int32)


define("integer_products(Tensor a, Tensor bt) -> Tensor", {"CPU": _compute}, _fake)
