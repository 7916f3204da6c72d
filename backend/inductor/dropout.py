"""The option "fast_dropout": Inductor is given a dropout for the CPU that draws from the rounding stream (`qsync::keep`).

What attention in BF16 drops stands in no graph of ours, only in what tracing makes of it, so this is a decomposition and no lowering. Each
dropout of a graph has a stream of its own; the seed is one a step.

Invariant: a value is dropped in the backward pass where it was dropped in the forward pass: the bytes that say so are saved. A region of
activation checkpointing would draw them anew from another seed; a graph that has one keeps torch's dropout, and it is said.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.operators.bits import pack_bits, unpack_bits
from qsync_fx.backend.operators.keep import keep
from qsync_fx.errors import PlanWarning
from qsync_fx.graph import PrecisionGraph
from qsync_fx.rounding.layout import DROPOUT, SHARED, Streams

aten = torch.ops.aten

_DROPPING: Final = (aten.dropout.default, aten.native_dropout.default, aten.scaled_dot_product_attention.default)


def decomposition() -> Callable[..., Any]:
    """Returns `aten.native_dropout` for one graph; what it is not for, it leaves to torch."""
    streams = Streams(DROPOUT, SHARED)

    def native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
        if not train or not 0.0 < p < 1.0 or not x.dtype.is_floating_point or x.device.type != "cpu":
            return NotImplemented
        kept = keep(x.shape, torch.ops.qsync.draw.default(x.device), streams.take(), p)
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
    """Returns whether the dropout of a graph may be ours; warns where it was asked for and may not."""
    parts = list(graph.walk())
    nodes = [node for part in parts for node in part.nodes]
    if graph.context.device.type != "cpu" or not any(node.target in _DROPPING for node in nodes):
        return False
    if len(parts) == 1 and not any(node.target is aten.native_dropout.default for node in nodes):
        return True
    warnings.warn(
        'the option "fast_dropout" has no effect on a graph with activation checkpointing or another operator that has a body, or with a '
        "call of torch.native_dropout: torch's dropout stays there",
        PlanWarning,
        stacklevel=2,
    )
    return False
