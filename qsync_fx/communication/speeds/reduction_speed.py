"""How long ranks take to average gradients, in each codec and by torch's own hooks, over the process group at hand.

Invariant: the ways take turns, so that whatever else the machine and the link do falls on all of them; a ratio is the median of the ratios
within a turn. What counts is the rank that takes longest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from qsync_fx.communication.assigned import to_all
from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.compression import Compression
from qsync_fx.communication.control import CPU, carrying, meet, slowest
from qsync_fx.communication.hierarchy import Nodes

PLAIN: Final = "torch fp32"
HALF: Final = "torch fp16"
"""What torch offers: all-reduce, and its hook that converts."""
_WIDTH: Final = 1024
_WARMUP: Final = 3


@dataclass(frozen=True)
class Reduction:
    """One way to average gradients.

    Attributes:
        way: a codec's name, or one of torch's hooks.
        seconds: of one reduction.
        to_plain, to_half: how many times as fast as torch in FP32, and as its FP16 hook.
        coding: seconds of encoding and decoding among them; None for torch's hooks.
        wire: bytes that a rank sends; None for torch's hooks.
        theory: what the papers give for them.
    """

    way: str
    seconds: float
    to_plain: float
    to_half: float
    coding: float | None = None
    wire: float | None = None
    theory: float | None = None


@dataclass(frozen=True)
class _Whole:
    """All gradients as one bucket, with what hooks ask of one."""

    parameter: nn.Parameter
    values: Tensor

    def buffer(self) -> Tensor:
        return self.values

    def gradients(self) -> list[Tensor]:
        return [self.values.view(self.parameter.shape)]

    def parameters(self) -> list[nn.Parameter]:
        return [self.parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def reductions(
    codecs: Sequence[str], values: int = 26 * 2**18, repeats: int = 15, nodes: Nodes | None = None
) -> list[Reduction]:
    """Returns what each way takes for so many values, in FP32 inside nodes where these are given. All ranks call it, and get the same."""
    rank, world, plain = distributed.get_rank(), distributed.get_world_size(), carrying(CPU)
    parameter = nn.Parameter(torch.zeros(max(1, values // _WIDTH), _WIDTH))
    source = torch.randn(parameter.numel(), generator=torch.Generator().manual_seed(rank)) * 1e-3
    bucket = _Whole(parameter, torch.empty_like(source))
    handles: dict[str, Compression] = {}
    for name in codecs:
        # A group of its own each, as `compress` has.
        group = distributed.new_group(backend="gloo") if world > 1 else None
        assigned = to_all(codec_named(name), [1], 0)
        handles[name] = Compression(
            group, rank, world, [("gradient", parameter)], assigned, seed=0, check_every=0, nodes=nodes
        )
    hooks: dict[str, Callable[[Any, Any], Any]] = {
        PLAIN: default_hooks.allreduce_hook,
        HALF: default_hooks.fp16_compress_hook,
        **{name: handle.hook for name, handle in handles.items()},
    }

    def seconds(way: str) -> float:
        bucket.values.copy_(source)
        meet()
        begin = time.perf_counter()
        reduced = hooks[way](plain, bucket)
        if way in handles:
            handles[way].wait()
        reduced.wait()
        return time.perf_counter() - begin

    for way in hooks:
        for _ in range(_WARMUP):
            seconds(way)
    before = {name: handle.report().tally for name, handle in handles.items()}
    ways = list(hooks)
    turns: list[list[float]] = []
    for turn in range(repeats):
        shift = turn % len(ways)
        found = {way: seconds(way) for way in ways[shift:] + ways[:shift]}
        turns.append([found[way] for way in ways])
    # Of every way's turns the slowest rank's, all of them at once.
    told = slowest([taken for turn in turns for taken in turn])
    times = {way: told[at :: len(ways)] for at, way in enumerate(ways)}

    made = []
    for way in ways:
        own, done = times[way], {}
        if way in handles:
            now, then = handles[way].report().tally, before[way]
            coding = now.encode + now.decode - then.encode - then.decode
            done = {
                "coding": coding / repeats,
                "wire": (now.wire - then.wire) / repeats,
                "theory": (now.theory - then.theory) / repeats,
            }
        to = {
            "to_plain": statistics.median(a / b for a, b in zip(times[PLAIN], own, strict=True)),
            "to_half": statistics.median(a / b for a, b in zip(times[HALF], own, strict=True)),
        }
        made.append(Reduction(way, statistics.median(own), **to, **done))
    return made
