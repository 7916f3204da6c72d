"""Formulas that Inductor is given on the CPU in place of its own, where those end in scalar code; on CUDA, those of quantizers that there
is no kernel for.

Invariant: what is computed is the same, but for the order in which overlapping windows of a pooling are summed, and the type; and for the
numbers that dropout draws, where that is asked for. A table has a name that torch's caches on disk know a graph by.

The option "fast_dropout": Inductor is given a dropout for the CPU that draws from the rounding stream (`qsync::keep`).

What attention in BF16 drops stands in no graph of ours, only in what tracing makes of it, so this is a decomposition and no lowering. Each
dropout of a graph has a stream of its own; the seed is one a step.

Invariant: a value is dropped in the backward pass where it was dropped in the forward pass: the bytes that say so are saved. A region of
activation checkpointing would draw them anew from another seed; a graph that has one keeps torch's dropout, and it is said to who asked.
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
    """Returns `aten.native_dropout` for one graph, its masks kept in bytes or in bits; what it is not for, it leaves to torch."""
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
    """Returns `aten.native_dropout` for "activation_recompute": what torch's drops, with a mask that both passes read from a bit a
    value."""

    def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
        if not train or not 0.0 < p < 1.0 or x.device.type != "cpu":
            return torchs(x, p, train)
        _, drawn = torchs(x, p, train)
        mask = unpack_bits(pack_bits(drawn), drawn.shape)
        return mask * x * (1.0 / (1.0 - p)), mask

    return native_dropout


def serves(graph: PrecisionGraph) -> bool:
    """Returns whether the dropout of a graph is ours; warns where it was asked for and may not be."""
    if drawn(graph):
        return True
    if graph.context.options.fast_dropout and may_be_drawn(graph):
        warnings.warn(
            'the option "fast_dropout" has no effect on a graph with activation checkpointing or another operator that has a body, or with '
            "a call of torch.native_dropout: torch's dropout stays there",
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
    """torch's kernel, as in eager mode: Inductor's scatter, or gather, is not vectorized, and was a tenth of a ResNet-18 step."""
    result = max_pool2d_gradient(
        gradient, indices, x.shape, kernel, stride, padding, dilation, ceil_mode
    )
    # The kernel follows the gradient, torch's operator the input.
    return result.contiguous(memory_format=suggest_memory_format(x))


class DecompositionTable(dict[OpOverload, Callable[..., Any]]):
    """A table that is pickled as what it was made of: torch 2.13 has it in the key of a graph in its caches, and none of its operators
    can be pickled, so that no graph was ever found there."""

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
    """Returns Inductor's table of decompositions with ours in it, those of the options too; None where its own is right."""
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
        # It is missing where Inductor draws as torch does, under which setting a graph is read from torch's caches.
        table = {**table, dropping: in_bits(table[dropping])}
    ours: dict[OpOverload, Callable[..., Any]] = {
        aten.convolution_backward.default: layouts.convolution_backward,
        aten.threshold_backward.default: threshold_backward,
        aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
        aten.embedding_dense_backward.default: embedding_gradient,
    }
    return DecompositionTable({**table, **ours}, made_of)
