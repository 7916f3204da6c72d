"""Where the random numbers of stochastic rounding come from.

Invariant: one random number a graph and step, drawn from the rounding stream (`qsync_fx.rounding.stream`), and a stream of its own for
every rounding. What is recomputed is rounded as it was: a body gets the number of the graph around it as one more operand, and no
partitioner of joint graphs draws a second one for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.rounding.mode import Rounding


def drawn(graph: PrecisionGraph, rounding: Rounding) -> fx.Node:
    """Returns a new first node that draws the number; one that gives zero where no rounding is random."""
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    device = graph.context.device
    target: Any = torch.ops.qsync.draw.default
    args: tuple[Any, ...] = (device,)
    keywords: dict[str, Any] = {}
    if rounding != "stochastic":
        target, args, keywords = torch.ops.aten.zeros.default, ([1],), {"dtype": torch.int64, "device": device}
    with graph.graph.inserting_before(first):
        seed = graph.graph.create_node("call_function", target, args, keywords, name="seed")
    meta.CAST[seed] = meta.Cast(meta.Part.SEED, None)
    seed.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    graph.propagate(seed)
    return seed
