"""The option "fast_dropout": Inductor is given a dropout for the CPU that draws from the rounding stream (`qsync::keep`).

What attention in BF16 drops stands in no graph of ours, only in what tracing makes of it, so this is a decomposition and no lowering. Each
dropout of a graph has a stream of its own; the seed is one a step.

Invariant: a value is dropped in the backward pass where it was dropped in the forward pass: the bytes that say so are saved. A region of
activation checkpointing would draw them anew from another seed; a graph that has one keeps torch's dropout, and it is said to who asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.operators.bits import pack_bits, unpack_bits
from qsync_fx.backend.operators.keep import keep
from qsync_fx.errors import PlanWarning
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.dropout import drawn, may_be_drawn
from qsync_fx.rounding.layout import DROPOUT, SHARED, Streams


def decomposition(bits: bool = False) -> Callable[..., Any]:
    """Returns `aten.native_dropout` for one graph, its masks kept in bytes or in bits; what it is not for, it leaves to torch."""
    streams = Streams(DROPOUT, SHARED)

    def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
        if not train or not 0.0 < p < 1.0 or not x.dtype.is_floating_point or x.device.type != "cpu":
            return NotImplemented
        kept = keep(x.shape, torch.ops.qsync.draw.default(x.device), streams.take(), p)
        if bits:
            kept = unpack_bits(pack_bits(kept.view(torch.bool)), kept.shape)
        return x * kept.to(x.dtype) * (1.0 / (1.0 - p)), kept

    return native_dropout


def in_bits(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `aten.native_dropout` for "keep_less": what torch's drops, with a mask that both passes read from a bit a value."""

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
