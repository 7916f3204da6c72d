"""`qsync::integer_products`: the products of two stacks of INT8 matrices, by the CPU's unit for them.

Why opaque: torch multiplies a stack of INT8 matrices without the unit, and overflows; one by one, each would be a node of the graph.

Invariant: sums are exact, as those of `qsync_fx.backend.operators.multiplying.integers`, which says when there are any.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.multiplying import integers


def _compute(a: Tensor, bt: Tensor) -> Tensor:
    found = torch.empty((*a.shape[:-1], bt.shape[1]), dtype=torch.int32)
    for one, other, into in zip(a, bt, found, strict=True):
        torch._int_mm(integers.strided(one), integers.strided(other).t(), out=into)
    return found


def _fake(a: Tensor, bt: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], bt.shape[1]), dtype=torch.int32)


define("integer_products(Tensor a, Tensor bt) -> Tensor", {"CPU": _compute}, _fake)
