"""Which gradients of a depthwise convolution a CPU computes in FP32 with channels last: those that oneDNN has no fast kernel for.

The input gradient in BF16 of one that moves by more than one took 7 to 113 times as long as in FP32, and the weight gradient of one of
5 x 5 or 7 x 7 values 1.5 to 3.5 times; in FP32, with conversions, they take 0.03 to 0.66 of BF16's time. All else took 0.3 to 1.1 of
FP32's time, and so did convolutions in larger groups (`benchmarks/kernels/cpu_kernels.py --only grouped`; AVX512-BF16, torch 2.13).

Invariant: what is computed so is at least as exact: the same values are multiplied, and sums are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.operators.gradients.depthwise import depthwise_gradients
from qsync_fx.backend.operators.memory_order import convolution_format

LARGE: Final = 5
"""Values of the longer side of a kernel from which on the weight gradient is."""


def slow(weight: Tensor, stride: Sequence[int], transposed: bool, groups: int) -> tuple[bool, bool]:
    """Returns whether oneDNN has no fast kernel for the input gradient, and for the weight gradient, of a convolution as Inductor gives
    it: in BF16, and of large kernels in FP32 as well, whose operands it lays out badly."""
    if weight.dim() != 4 or weight.dtype not in (torch.bfloat16, torch.float32) or weight.device.type != "cpu":
        return False, False
    if transposed or weight.shape[1] != 1 or not weight.shape[0] == groups > 1:
        return False, False
    return weight.dtype is torch.bfloat16 and max(stride) > 1, max(weight.shape[2:]) >= LARGE


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
    """The decomposition: what is slow by an operator of ours, and what is not as it was."""
    wide = slow(weight, stride, transposed, groups)
    in_fp32 = [a and b for a, b in zip(needed, wide, strict=False)]
    if not any(in_fp32):
        return NotImplemented
    wide_gradients = depthwise_gradients(gradient, x, weight, stride, padding, dilation, in_fp32)
    layout = convolution_format(x, weight)
    gradients = [None if t is None else t.contiguous(memory_format=layout) for t in (*wide_gradients, None)]
    others = [a and not b for a, b in zip(needed, [*in_fp32, False], strict=True)]
    if others[2] and not others[1]:
        # oneDNN has the bias's gradient from the kernel of the weight's, which would run once more for it.
        others[2], gradients[2] = False, gradient.sum((0, 2, 3), dtype=torch.float32).to(gradient.dtype)
    if any(others):
        rest = bias_sizes, stride, padding, dilation, transposed, output_padding, groups
        narrow = torch.ops.aten.convolution_backward.default(gradient, x, weight, *rest, others)
        pairs = zip(narrow, gradients, strict=True)
        gradients = [new if of_fp32 is None else of_fp32 for new, of_fp32 in pairs]
    return tuple(gradients)
