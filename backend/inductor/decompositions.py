"""Decomposition tables for Inductor: vectorized code on the CPU, fusible quantizers on CUDA.

Invariant: results equal Inductor's except for the order in which overlapping pooling windows are
summed, the dtype, and the values that dropout drops. Sums of 16-bit embedding gradients are FP32,
rounded once, and so are products on a CPU without 16-bit products in oneDNN.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from qsync_fx import torch_internals as internals
from qsync_fx.backend.inductor import fusible_quantize, layouts, recompute_policy
from qsync_fx.backend.operators import products_in_fp32
from qsync_fx.backend.operators.registration import define
from qsync_fx.errors import PlanWarning
from qsync_fx.graph.graph import PrecisionGraph, drawn, may_be_drawn

aten = torch.ops.aten


def serves(graph: PrecisionGraph) -> bool:
    """Return whether dropout uses the rounding stream; warn if it was requested but cannot.

    Activation checkpointing would draw the masks again, from another seed.
    """
    if drawn(graph):
        return True
    if graph.context.options.fast_dropout and may_be_drawn(graph):
        warnings.warn(
            'the option "fast_dropout" has no effect on a graph with activation checkpointing or '
            "another higher-order operator, or with a call of torch.native_dropout: the dropout "
            "of torch runs there",
            PlanWarning,
            stacklevel=2,
        )
    return False


@define(
    "embedding_gradient(Tensor gradient, Tensor indices, SymInt rows, SymInt padding, bool "
    "by_frequency) -> Tensor",
    fake=lambda gradient, indices, rows, *_: gradient.new_empty((rows, gradient.shape[-1])),
)
def embedding_gradient(
    gradient: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    """Add each row of `gradient` to the row of a table that its index names.

    Inductor's decomposition is a masked scatter of single values; torch's kernel adds whole rows.

    Args:
        gradient: `[*indices.shape, D]`, floating point.
        indices: int32 or int64, any shape.
        padding: the row without a gradient; -1 for none.
        by_frequency: whether to divide each row by the number of its indices.

    Returns:
        `[rows, D]`, dtype of `gradient`.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    scatter = aten.embedding_dense_backward.default
    summed: Tensor = scatter(gradient.to(wide), indices, rows, padding, by_frequency)
    return summed.to(gradient.dtype)


def _like(gradient: Tensor, size: Sequence[int]) -> Tensor:
    layout = torch.contiguous_format
    if gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    return torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=layout)


@define(
    "max_pool2d_gradient(Tensor gradient, Tensor indices, SymInt[] size, SymInt[] kernel, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool ceil_mode) -> Tensor",
    fake=lambda gradient, indices, size, *_: _like(gradient, size),
)
def max_pool2d_gradient(
    gradient: Tensor, indices: Tensor, size: Sequence[int], *window: object
) -> Tensor:
    """Add each element of `gradient` at the position of its maximum.

    torch's own operator also requires the pooling's input; Inductor's is not vectorized.

    Args:
        gradient: `[N, C, H', W']` or `[C, H', W']`, floating point.
        indices: int64, same shape: `h * W + w` in the input.
        size: shape of the input, `[N, C, H, W]` or `[C, H, W]`.
        window: kernel, stride, padding, dilation and ceil_mode of the pooling.

    Returns:
        Shape `size`, dtype and memory format of `gradient`; overlapping windows are summed.
    """
    result = _like(gradient, size)
    # torch's kernel reads only shape and memory format of the input: the result can serve as one.
    aten.max_pool2d_with_indices_backward.grad_input(
        gradient, result, *window, indices, grad_input=result
    )
    return result


def _max_pool2d_backward(gradient: Tensor, x: Tensor, *rest: Any) -> Tensor:
    *window, indices = rest
    result = max_pool2d_gradient(gradient, indices, x.shape, *window)
    # The kernel preserves the gradient's memory format, torch's operator the input's.
    return result.contiguous(memory_format=internals.suggest_memory_format(x))


class DecompositionTable(dict[internals.OpOverload, Callable[..., Any]]):
    """A decomposition table that is pickled, for cache keys, as the arguments that it is of."""

    def __init__(
        self, table: Mapping[internals.OpOverload, Callable[..., Any]], made_of: tuple[Any, ...]
    ) -> None:
        super().__init__(table)
        self._made_of = made_of

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return for_inductor, self._made_of


def for_inductor(
    device: torch.device,
    fast_dropout: bool = False,
    activation_recompute: bool = False,
    widened: tuple[torch.dtype, ...] | None = None,
) -> DecompositionTable | None:
    """Return Inductor's decomposition table with ours, or None if its own needs no change.

    `widened` is part of cache keys; it is by default the result of `products_in_fp32.widened`.
    """
    if widened is None:
        widened = products_in_fp32.widened(device)
    table, dropout = dict(internals.select_decomp_table()), aten.native_dropout.default
    ours = fusible_quantize.decompositions(device)
    if device.type != "cpu" and not ours:
        return None
    if device.type == "cpu":
        ours = {
            aten.convolution_backward.default: layouts.convolution_backward,
            aten.threshold_backward.default: recompute_policy.threshold_backward,
            aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
            aten.embedding_dense_backward.default: embedding_gradient,
        }
        # Inductor has no decomposition of dropout if "fallback_random" is set, as when it loads a
        # graph from torch's caches.
        if fast_dropout:
            ours[dropout] = recompute_policy.fast_dropout(bits=activation_recompute)
        elif activation_recompute and dropout in table:
            ours[dropout] = recompute_policy.dropout_in_bits(table[dropout])
        if widened:
            ours |= products_in_fp32.decompositions(table | ours)
    return DecompositionTable(table | ours, (device, fast_dropout, activation_recompute, widened))
