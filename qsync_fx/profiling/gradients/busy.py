"""What all-reduces, and codecs, take of a rank that computes beside them.

Invariant: all ranks measure together, send as much, and know the same number.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import distributed

from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.codecs.codec import Draw
from qsync_fx.communication.control import CPU, carrying, mean, meet
from qsync_fx.profiling.gradients.collectives import finish

_TRAVEL: Final = 0.02
"""Seconds that gradients are to travel, at least: for clocks and schedulers not to matter."""
_LONGEST: Final = 0.01
"""Seconds that one message takes at most, where there are shorter ones."""
_LARGEST: Final = 2**22
"""Bytes of a message: a few of them lie in memory, as buckets do, and not in a cache."""
_BESIDE: Final = 4
"""How much longer than they travel a rank computes, so that each has arrived before the next one, slowed down as it is."""
_REPEATS: Final = 21
"""Each is a small difference of two long times: their median is within a tenth where single ones are half of it off."""
_WARM: Final = 16
"""Products of which it is seen how long one takes."""
_CODEC: Final = "qsgd8"
"""What is written beside products: all codecs keep a core as busy."""
_VALUES: Final = 2**20
_SIZE: Final = 256
"""Of the products that a rank computes: they lie in a core's cache, so that cores are what is shared."""


def busy(table: Sequence[tuple[int, float]], device: torch.device = CPU) -> float:
    """Returns what of the seconds that all-reduces travel a rank computes later, between 0 and 1; the same on all ranks, which call it
    together.

    Products are computed by as many threads as torch uses, once alone and once with messages handed over one after the other meanwhile, as
    a backward pass does it. All at once they cost less: what sends is woken up once.

    Args:
        table: bytes and seconds of all-reduces between the ranks, the same on all of them.
        device: what computes, and where messages lie.
    """
    short = [one for one in table if one[0] <= _LARGEST and one[1] <= _LONGEST]
    nbytes, seconds = max(short, default=min(table))
    messages = [torch.zeros(max(1, nbytes // 4), device=device) for _ in range(math.ceil(_TRAVEL / seconds))]
    travel = len(messages) * seconds
    every = max(1, round(_BESIDE * seconds * _WARM / _computed(_WARM, device)))
    found = []
    for _ in range(_REPEATS):
        meet()
        alone = _computed(every * len(messages), device)
        meet()
        beside = _computed(every * len(messages), device, messages)
        found.append((beside - alone) / travel)
    return _agreed(found)


def coding() -> float:
    """Returns what of the seconds in which a thread writes gradients in a codec a rank computes later, between 0 and 1; the same on all
    ranks, which call it together.

    0 where another core does it, 1 where there is none: a rank of two threads that may use one core, or all ranks of a machine together.
    """
    codec = codec_named(_CODEC)
    values = torch.randn(_VALUES)
    wire = torch.empty(codec.nbytes(_VALUES), dtype=torch.uint8)

    def write(many: int) -> float:
        begin = time.perf_counter()
        for _ in range(many):
            codec.encode(values, wire, Draw(0, 0))
        return time.perf_counter() - begin

    each = write(_REPEATS) / _REPEATS
    turns = round(_BESIDE * _TRAVEL / _computed(_WARM) * _WARM)
    many = max(1, round(_TRAVEL / each))
    found = []
    for _ in range(_REPEATS // 2):
        meet()
        coded, alone = write(many), _computed(turns)
        meet()
        other = threading.Thread(target=write, args=(many,))
        other.start()
        beside = _computed(turns)
        other.join()
        found.append((beside - alone) / coded)
    return _agreed(found)


def _agreed(found: Sequence[float]) -> float:
    """Returns the mean over all ranks of the medians that they found, between 0 and 1."""
    return min(1.0, max(0.0, mean(statistics.median(found))))


def _computed(turns: int, device: torch.device = CPU, messages: Sequence[torch.Tensor] = ()) -> float:
    """Returns the seconds of so many products, a multiple of the number of messages, which are handed over evenly among them."""
    values, out = torch.ones(_SIZE, _SIZE, device=device), torch.empty(_SIZE, _SIZE, device=device)
    group = carrying(device) if messages else None
    every = turns // max(1, len(messages))
    works = []
    begin = time.perf_counter()
    for turn in range(turns):
        if messages and turn % every == 0:
            works.append(distributed.all_reduce(messages[turn // every], group=group, async_op=True))
        torch.mm(values, values, out=out)
    finish(device)
    taken = time.perf_counter() - begin
    for work in works:
        if work is not None:
            work.wait()
    return taken
