"""How long an all-reduce takes between the ranks that are up, by bytes."""

from __future__ import annotations

import time

import torch
from torch import distributed

from qsync_fx.profiling.profile import Collective

_SMALLEST, _LARGEST, _STEP = 10, 26, 2
"""Powers of two of the bytes that are measured: 1 KiB to 64 MiB."""
_REPEATS = 5


def collectives() -> list[Collective]:
    """Measures all-reduces of FP32 values, on all ranks at once; nothing where torch.distributed is not up, or there is one rank."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return []
    table = [(2**power, all_reduce_seconds(2**power)) for power in range(_SMALLEST, _LARGEST + 1, _STEP)]
    return [Collective(str(distributed.get_backend()), distributed.get_world_size(), table)]


def all_reduce_seconds(nbytes: int, repeats: int = _REPEATS) -> float:
    """Returns the median over some repeats of the seconds that the slowest rank took; the same on all ranks, which call it together."""
    values = torch.zeros(nbytes // 4)
    taken = torch.zeros(repeats)
    for at in range(-1, repeats):
        distributed.barrier()
        start = time.perf_counter()
        distributed.all_reduce(values)
        if at >= 0:
            taken[at] = time.perf_counter() - start
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    return float(taken.median())
