"""Which gradients of a depthwise convolution in BF16 a CPU computes in FP32: those that oneDNN has no fast kernel for.

The input gradient of one that moves by more than one took 7 to 36 times as long as in FP32, and the weight gradient of one of 5 x 5 or
7 x 7 values 1.6 to 4.5 times; in FP32, with conversions, they take 0.05 to 0.65 of BF16's time. All else took 0.3 to 1.1 of FP32's time,
and so did convolutions in larger groups (`benchmarks/kernels/cpu_kernels.py --only grouped`; AVX512-BF16, torch 2.13).

Invariant: what is computed so is at least as exact: the same values are multiplied, and sums are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

LARGE: Final = 5
"""Values of the longer side of a kernel from which on the weight gradient is."""

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def slow(weight: Tensor, stride: Sequence[int], transposed: bool, groups: int) -> tuple[bool, bool]:
    """Returns whether oneDNN has no fast kernel for the input gradient, and for the weight gradient, of a convolution in BF16."""
    if weight.dim() != 4 or weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
        return False, False
    if transposed or weight.shape[1] != 1 or not weight.shape[0] == groups > 1:
        return False, False
    return max(stride) > 1, max(weight.shape[2:]) >= LARGE


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    needed: Sequence[bool],
) -> Any:
    """The decomposition: what is slow in FP32, and what is not as it was."""
    wide = slow(weight, stride, transposed, groups)
    in_fp32 = [*(a and b for a, b in zip(needed, wide, strict=False)), False]
    if not any(in_fp32):
        return NotImplemented
    rest = bias_sizes, stride, padding, dilation, transposed, output_padding, groups
    backward = torch.ops.aten.convolution_backward.default
    wider: _Gradients = backward(gradient.float(), x.float(), weight.float(), *rest, in_fp32)
    others = [a and not b for a, b in zip(needed, in_fp32, strict=True)]
    narrow: _Gradients = backward(gradient, x, weight, *rest, others) if any(others) else (None, None, None)
    return tuple(one if other is None else other.to(weight.dtype) for one, other in zip(narrow, wider, strict=True))
