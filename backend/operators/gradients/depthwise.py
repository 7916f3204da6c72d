"""`qsync::depthwise_gradients`: gradients of a depthwise convolution in FP32 with channels last, where oneDNN is fast at them.

Why an operator of its own: what Inductor gives to torch's it lays out first as the gradient of the weight lies, of which one channel has
any strides, and oneDNN took 1.6 to 4.2 times as long for that.

Invariant: sums are in FP32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define


def depthwise_gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of what a convolution reads and of its weight, those that are needed.

    Args:
        gradient: `[N, C, H', W']`, BF16 or FP32.
        x: `[N, C, H, W]`, of the same type.
        weight: `[C, 1, R, S]`, of the same type.
        stride, padding, dilation: those of the convolution.
        needed: which of the two.

    Returns:
        `[N, C, H, W]` with channels last, and `[C, 1, R, S]`; None for what is not needed.
    """
    found = torch.ops.qsync.depthwise_gradients.default(gradient, x, weight, stride, padding, dilation, list(needed))
    of_x, of_weight = (one if wanted else None for one, wanted in zip(found, needed, strict=True))
    return of_x, of_weight


def _kernel(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *window, needed = rest
    read = [t.to(torch.float32, memory_format=torch.channels_last) for t in (gradient, x)]
    where = None, *window, False, [0, 0], weight.shape[0]
    of_x, of_weight, _ = torch.ops.aten.convolution_backward.default(*read, weight.float(), *where, [*needed, False])
    if of_x is not None:
        of_x = of_x.to(x.dtype, memory_format=torch.channels_last)
    if of_weight is not None:
        of_weight = of_weight.to(weight.dtype, memory_format=torch.contiguous_format)
    return x.new_empty(0) if of_x is None else of_x, weight.new_empty(0) if of_weight is None else of_weight


def _fake(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    of_x, of_weight = rest[-1]
    return (
        torch.empty_like(x, memory_format=torch.channels_last) if of_x else x.new_empty(0),
        torch.empty_like(weight, memory_format=torch.contiguous_format) if of_weight else weight.new_empty(0),
    )


define(
    "depthwise_gradients(Tensor gradient, Tensor x, Tensor weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "bool[2] needed) -> (Tensor, Tensor)",
    {"CompositeExplicitAutograd": _kernel},
    _fake,
)
