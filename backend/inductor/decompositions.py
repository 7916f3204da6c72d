"""Decomposition tables for Inductor: vectorized code on the CPU, fusible quantizers on CUDA.

Invariant: results equal Inductor's except for the order in which overlapping pooling windows are
summed, the dtype, and the values that dropout drops.

The option "fast_dropout" draws masks from the rounding stream (`qsync::keep`). It is a
decomposition and not a lowering because the dropout of BF16 attention appears only in the traced
graph. Each dropout has its own stream; the graph's seed is drawn once per step. The masks are
saved, so both passes drop the same values. Activation checkpointing would draw them again from
another seed, so graphs with a checkpoint keep torch's dropout, with a warning if the option was
set.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from qsync_fx.backend.inductor import layouts, quantize_lowerings
from qsync_fx.backend.inductor.recompute_policy import threshold_backward
from qsync_fx.backend.operators.masks import keep, pack_bits, unpack_bits
from qsync_fx.backend.operators.scatter_gradients import embedding_gradient, max_pool2d_gradient
from qsync_fx.errors import PlanWarning
from qsync_fx.graph.graph import PrecisionGraph, drawn, may_be_drawn
from qsync_fx.rounding import DROPOUT, SHARED, RandomStreams


def decomposition(bits: bool = False) -> Callable[..., Any]:
    """Return `aten.native_dropout` for one graph; `bits` packs saved masks.

    It returns NotImplemented, which leaves the call to torch, unless the input is floating point on
    the CPU, in training, with 0 < p < 1.
    """
    streams = RandomStreams(DROPOUT, SHARED)

    def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
        if (
            not train
            or not 0.0 < p < 1.0
            or not x.dtype.is_floating_point
            or x.device.type != "cpu"
        ):
            return NotImplemented
        saved = keep(x.shape, torch.ops.qsync.draw.default(x.device), streams.take(), p)
        if bits:
            saved = unpack_bits(pack_bits(saved.view(torch.bool)), saved.shape)
        return x * saved.to(x.dtype) * (1.0 / (1.0 - p)), saved

    return native_dropout


def in_bits(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `aten.native_dropout` with a mask that both passes read from packed bits."""

    def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
        if not train or not 0.0 < p < 1.0 or x.device.type != "cpu":
            return torchs(x, p, train)
        _, drawn = torchs(x, p, train)
        mask = unpack_bits(pack_bits(drawn), drawn.shape)
        return mask * x * (1.0 / (1.0 - p)), mask

    return native_dropout


def serves(graph: PrecisionGraph) -> bool:
    """Return whether dropout uses the rounding stream; warn if it was requested but cannot."""
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


aten = torch.ops.aten


def _max_pool2d_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Scatter with torch's kernel; Inductor's is not vectorized (a tenth of a ResNet-18 step)."""
    result = max_pool2d_gradient(
        gradient, indices, x.shape, kernel, stride, padding, dilation, ceil_mode
    )
    # The kernel preserves the gradient's memory format, torch's operator the input's.
    return result.contiguous(memory_format=suggest_memory_format(x))


class DecompositionTable(dict[OpOverload, Callable[..., Any]]):
    """A decomposition table that is pickled as the arguments that it was built from.

    torch 2.13 includes the table in cache keys of graphs, and the operators in it cannot be
    pickled, so that no graph was ever found in the cache.
    """

    def __init__(
        self, table: Mapping[OpOverload, Callable[..., Any]], made_of: tuple[Any, ...]
    ) -> None:
        super().__init__(table)
        self._made_of = made_of

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return for_inductor, self._made_of


def for_inductor(
    device: torch.device, fast_dropout: bool = False, activation_recompute: bool = False
) -> DecompositionTable | None:
    """Return Inductor's decomposition table with ours, or None if its own needs no change."""
    from torch._inductor.decomposition import select_decomp_table

    made_of = device, fast_dropout, activation_recompute
    if device.type != "cpu":
        written = quantize_lowerings.decompositions(device)
        return (
            DecompositionTable({**select_decomp_table(), **written}, made_of) if written else None
        )

    table, dropping = select_decomp_table(), aten.native_dropout.default
    if fast_dropout:
        table = {**table, dropping: decomposition(bits=activation_recompute)}
    elif activation_recompute and dropping in table:
        # Inductor omits it if "fallback_random" is set, as when it loads a graph from torch's
        # caches.
        table = {**table, dropping: in_bits(table[dropping])}
    ours: dict[OpOverload, Callable[..., Any]] = {
        aten.convolution_backward.default: layouts.convolution_backward,
        aten.threshold_backward.default: threshold_backward,
        aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
        aten.embedding_dense_backward.default: embedding_gradient,
    }
    return DecompositionTable({**table, **ours}, made_of)
