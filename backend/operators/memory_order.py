"""`qsync::in_order`: a tensor with its dimensions in a given order in memory.

A traced graph lacks a `contiguous()` of the model that had no effect on the traced strides, and
`view` fails on other strides. So an operator that replaces torch's has the same output strides.

Invariant: `in_order` returns its input if the strides are as required.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qsync_fx.backend.operators.registration import define


def in_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return `x`, or a copy of it, dense in memory with its dimensions in `order`.

    Args:
        x: any shape and strides.
        order: dimensions of `x` from the outermost in memory to the innermost; see
            `qsync_fx.graph.fx_utils.memory_order`.
    """
    permuted = x.permute(list(order))
    if _has_dense_strides(permuted):
        return x
    back = [list(order).index(dim) for dim in range(x.dim())]
    return _with_unit_strides(permuted.contiguous()).permute(back)


def _has_dense_strides(x: Tensor) -> bool:
    """Return whether `x` has a new contiguous tensor's strides, also in dimensions of size 1."""
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _with_unit_strides(x: Tensor) -> Tensor:
    """Return contiguous `x` with the strides of a new tensor along dimensions of size 1.

    These strides distinguish the memory formats of a tensor with one channel or one pixel.
    """
    if _has_dense_strides(x):
        return x
    units = [dim for dim, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    for dim in reversed(units):
        x = x.squeeze(dim)
    for dim in units:
        x = x.unsqueeze(dim)
    return x


def convolution_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the memory format of a convolution's output and gradients in torch.

    Args:
        x, weight: four or five dimensions.
    """
    formats = {suggest_memory_format(operand) for operand in (x, weight)} - {
        torch.contiguous_format
    }
    return formats.pop() if formats else torch.contiguous_format


define("in_order(Tensor x, int[] order) -> Tensor", {"CompositeImplicitAutograd": in_order})
