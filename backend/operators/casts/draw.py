"""`qsync::draw`: the seed of a graph's roundings in one step, from the rounding stream (`qsync_fx.rounding.stream`).

Why an operator: the number is another one at each step, so it cannot be a constant of the graph; and it belongs to the process that runs
the graph, rank and place in the stream included, so it cannot be decided when the graph is compiled, which other processes may have done.

Invariant: it reads no tensor and copies none: a fill with a number that the host knows, which waits for no device. What would record it
once and repeat the record, as the CUDA graphs of torch.compile do, is told not to. A user who captures a step by hand
(`torch.cuda.graph`) records it all the same: then it is torch's own generator on the device that draws, which moves on with each replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define
from qsync_fx.rounding.seeding import watch
from qsync_fx.rounding.stream import rounding_stream


def _draw(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.randint(2**62, [1], dtype=torch.int64, device=device)
    return torch.full([1], rounding_stream.draw(), dtype=torch.int64, device=device)


def _fake(device: torch.device) -> Tensor:
    return torch.empty([1], dtype=torch.int64, device=device)


define(
    "draw(Device device) -> Tensor",
    {"CompositeExplicitAutograd": _draw},
    _fake,
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
)
# With the operator: whatever states of torch's generator are taken from now on, they know a place in the stream.
watch()
