"""`qsync::widen`: a conversion to a wider type, whose gradient is rounded stochastically on its way back to the narrow one.

Why composite: forward it is torch's conversion, which a compiler fuses with what surrounds it.

Invariant: values are those of the conversion. The mean of the gradient over many roundings is the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define
from qsync_fx.backend.operators.products import narrowed


def widen(x: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Returns `x` as `dtype`.

    Args:
        x: floating point, any shape and strides.
        seed: int64, `[1]` or `[]`, of the graph.
        stream: tells operators of one graph apart.
        dtype: a type that holds all values of `x`'s.
    """
    found: Tensor = _Widen.apply(x, seed, stream, dtype)  # type: ignore[no-untyped-call]
    return found


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.how = x.dtype, stream
        return x.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (seed,), (dtype, stream) = ctx.saved_tensors, ctx.how
        return narrowed(gradient, dtype, seed, stream, "stochastic"), None, None, None


define(
    "widen(Tensor x, Tensor seed, int stream, ScalarType dtype) -> Tensor",
    {"CompositeImplicitAutograd": widen},
)
