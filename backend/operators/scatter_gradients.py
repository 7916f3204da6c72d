"""Scatter gradients by torch's kernels: `qsync::max_pool2d_gradient`, `qsync::embedding_gradient`.

torch's own `max_pool2d_with_indices_backward` also requires the pooling's input, which would be
saved or recomputed although only its shape is read. Inductor decomposes `embedding_dense_backward`
into a masked scatter of single values; torch's kernel adds whole rows.

Invariant: the values of the ATen operators; embedding sums of 16-bit types are FP32, rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

from qsync_fx.backend.operators.registration import define


def embedding_gradient(
    gradient: Tensor, indices: Tensor, rows: int | SymInt, padding: int | SymInt, by_frequency: bool
) -> Tensor:
    """Add each row of `gradient` to the row of a table that its index names.

    Args:
        gradient: `[*indices.shape, D]`, floating point.
        indices: int32 or int64, any shape.
        rows: number of rows of the table.
        padding: the row without a gradient; -1 for none.
        by_frequency: whether to divide each row by the number of its indices.

    Returns:
        `[rows, D]`, dtype of `gradient`.
    """
    result: Tensor = torch.ops.qsync.embedding_gradient.default(
        gradient, indices, rows, padding, by_frequency
    )
    return result


def _embedding_kernel(
    gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient
    summed: Tensor = torch.ops.aten.embedding_dense_backward.default(
        wide, indices, rows, padding, by_frequency
    )
    return summed.to(gradient.dtype)


def _embedding_fake(
    gradient: Tensor, indices: Tensor, rows: int | SymInt, padding: int | SymInt, by_frequency: bool
) -> Tensor:
    return gradient.new_empty((rows, gradient.shape[-1]))


define(
    "embedding_gradient(Tensor gradient, Tensor indices, SymInt rows, SymInt padding, bool "
    "by_frequency) -> Tensor",
    {"CompositeExplicitAutograd": _embedding_kernel},
    _embedding_fake,
)


def max_pool2d_gradient(
    gradient: Tensor,
    indices: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """Add each element of `gradient` at the position of its maximum.

    Args:
        gradient: `[N, C, H', W']` or `[C, H', W']`, floating point; its memory format is the
            result's.
        indices: int64, same shape: `h * W + w` in the input.
        size: shape of the input, `[N, C, H, W]` or `[C, H, W]`.
        kernel, stride, padding, dilation, ceil_mode: of the pooling.

    Returns:
        Shape `size`, dtype of `gradient`; overlapping windows are summed.
    """
    window = kernel, stride, padding, dilation, ceil_mode
    result: Tensor = torch.ops.qsync.max_pool2d_gradient.default(gradient, indices, size, *window)
    return result


def _like(gradient: Tensor, size: Sequence[int]) -> Tensor:
    last = gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if last else torch.contiguous_format
    return torch.empty(
        size, dtype=gradient.dtype, device=gradient.device, memory_format=memory_format
    )


def _max_pool_kernel(
    gradient: Tensor, indices: Tensor, size: Sequence[int], *window: object
) -> Tensor:
    result = _like(gradient, size)
    # torch's kernel reads only shape and memory format of the input, so the result can serve as
    # input.
    torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
        gradient, result, *window, indices, grad_input=result
    )
    return result


def _max_pool_fake(
    gradient: Tensor, indices: Tensor, size: Sequence[int], *window: object
) -> Tensor:
    return _like(gradient, size)


define(
    "max_pool2d_gradient(Tensor gradient, Tensor indices, SymInt[] size, SymInt[] kernel, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode) -> Tensor",
    {"CompositeExplicitAutograd": _max_pool_kernel},
    _max_pool_fake,
)
