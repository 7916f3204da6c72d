"""`qsync::carry`: a quantized tensor in the carrier, for the products of the forward pass.

Why an operator for what is a conversion: so that the quantized tensor is what is saved for the backward pass. A partitioner of joint graphs
that sees the same conversion in the forward and the backward pass saves its result, which is twice as large; and it counts a tensor
that only conversions read as one that need not be in memory, which makes saving it look dear. The backward pass converts as usual.
Nothing is lost: the conversion stands between two kernels that a compiler fuses nothing into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define


def carry(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of `q`, any shape and strides, as `dtype`, in which each is exact."""
    return q if q.dtype == dtype else torch.ops.qsync.carry.default(q, dtype)


def _convert(q: Tensor, dtype: torch.dtype) -> Tensor:
    return q.to(dtype, copy=True)


def _fake(q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(q, dtype=dtype)


define("carry(Tensor q, ScalarType dtype) -> Tensor", {"CompositeExplicitAutograd": _convert}, _fake)
