"""Randomized Hadamard transform H D of blocks, as torch operators.

D negates random values, and H has the stages (a + b, a - b) of strides 1, 2, 4 and so on. Each
value is spread over its block, which becomes nearly normally distributed: a single large value no
longer sets the step of stochastic rounding for all others (A. T. Suresh et al., "Distributed Mean
Estimation with Limited Communication", 2017, section 3).

All ranks and parameters share the signs of a step. This adds no variance: given the signs, rounding
is unbiased and independent between ranks, so its errors are uncorrelated. Sums of transformed
gradients are transforms of the sum, and error feedback, stored untransformed, fits the signs of any
step. Invariant: the bits of cpp/codecs/hadamard.h.
"""

from __future__ import annotations

import torch
from torch import Tensor


def transform(rows: Tensor, negative: Tensor) -> Tensor:
    """Return H D x of blocks x.

    Args:
        rows: [blocks, size], FP32; `size` is a power of two.
        negative: [blocks, size], bool: which values D negates.
    """
    result, stride = torch.where(negative, -rows, rows), 1
    while stride < rows.shape[1]:
        result, stride = _stage(result, stride), 2 * stride
    return result


def inverse(rows: Tensor, negative: Tensor) -> Tensor:
    """Return D H y / size, the blocks x of the transforms y = H D x.

    Args:
        rows: y, [blocks, size], FP32.
        negative: as for `transform`.
    """
    result, stride = rows, rows.shape[1] // 2
    while stride:
        result, stride = _stage(result, stride), stride // 2
    result = result * (1 / rows.shape[1])  # a power of two
    return torch.where(negative, -result, result)


def _stage(rows: Tensor, stride: int) -> Tensor:
    low, high = rows.view(rows.shape[0], -1, 2, stride).unbind(2)
    return torch.stack([low + high, low - high], 2).view(rows.shape)
