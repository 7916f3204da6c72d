"""`qsync::max_pool2d_gradient`: the input gradient of max pooling from the places of the maxima, by torch's kernel.

Why an operator of its own: torch's takes the pooling's input too, of which it reads nothing but the shape; that would be kept, or computed
again and written.

Invariant: the values of `aten::max_pool2d_with_indices_backward`.

`qsync::embedding_gradient`: the gradient of an embedding's table by torch's kernel, which adds whole rows.

Why an operator of its own: Inductor's scatter adds one value at a time, each behind a mask; it has a formula for torch's operator, and so
lets no kernel be called in its place.

Invariant: the values of `aten::embedding_dense_backward`; sums of types of 16 bits are in FP32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

from qsync_fx.backend.operators.registration import define


def embedding_gradient(
    gradient: Tensor, indices: Tensor, rows: int | SymInt, padding: int | SymInt, by_frequency: bool
) -> Tensor:
    """Adds each row of `gradient` to that of a table which its index names.

    Args:
        gradient: `[*indices.shape, D]`, floating point.
        indices: int32 or int64, any shape.
        rows: of the table.
        padding: the row that gets nothing; -1 for none.
        by_frequency: divides what a row gets by how often it is named.

    Returns:
        `[rows, D]`, of `gradient`'s type.
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
    "embedding_gradient(Tensor gradient, Tensor indices, SymInt rows, SymInt padding, bool by_frequency) -> Tensor",
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
    """Adds each element of `gradient` where its maximum was found.

    Args:
        gradient: `[N, C, H', W']` or `[C, H', W']`, floating point. Its memory format is the result's.
        indices: int64, same shape: `h * W + w` in the input.
        size: the input's shape, `[N, C, H, W]` or `[C, H, W]`.
        kernel, stride, padding, dilation, ceil_mode: those of the pooling.

    Returns:
        `size`, of `gradient`'s type, in which overlapping windows are summed.
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
    # Nothing is read of the input but its shape and memory format, which the result has, too: it stands in, and no more is allocated.
    torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
        gradient, result, *window, indices, grad_input=result
    )
    return result


def _max_pool_fake(
    gradient: Tensor, indices: Tensor, size: Sequence[int], *window: object
) -> Tensor:
    return _like(gradient, size)


define(
    "max_pool2d_gradient(Tensor gradient, Tensor indices, SymInt[] size, SymInt[] kernel, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool ceil_mode) -> Tensor",
    {"CompositeExplicitAutograd": _max_pool_kernel},
    _max_pool_fake,
)
