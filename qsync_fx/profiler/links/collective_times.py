"""How long an all-reduce takes between the ranks that are up, by bytes, and sending what a model has beside parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from qsync_fx.communication.control_group import CPU, carrying, meet, slowest
from qsync_fx.profiler.profile import Collective

_SMALLEST, _LARGEST, _STEP = 10, 26, 2
"""Powers of two of the bytes that are measured: 1 KiB to 64 MiB."""
_LARGEST_OF_GROUPS = 22
"""4 MiB, of which each rank of a node sends its own."""
_REPEATS = 5
_SHORT, _MANY = 0.02, 21
"""Seconds below which an all-reduce is repeated so often: where cores sleep while they wait, one in a few is late by milliseconds."""

_LATE = 0.005
"""Seconds that one rank comes later than the others."""


def collectives(device: torch.device = CPU) -> list[Collective]:
    """Measures all-reduces of FP32 values on a device, on all ranks at once; nothing where torch.distributed is not up, or there is one
    rank."""
    if (count := ranks()) == 1:
        return []
    table = rising(
        [(2**power, _steadily(2**power, device)) for power in range(_SMALLEST, _LARGEST + 1, _STEP)]
    )
    return [Collective(str(distributed.get_backend(carrying(device))), count, table)]


def ranks() -> int:
    """Returns how many ranks torch.distributed has; 1 where it is not up."""
    return (
        distributed.get_world_size()
        if distributed.is_available() and distributed.is_initialized()
        else 1
    )


def all_reduces(
    groups: Sequence[Sequence[int]], device: torch.device = CPU
) -> list[tuple[int, float]]:
    """Measures all-reduces of what lies on a device between the ranks of each group, all groups at once; called on all ranks, with all of
    them in groups.

    Returns:
        pairs of the bytes that each rank gives and the seconds that the slowest took, the same on all ranks.
    """
    backend = None if (full := carrying(device)) is None else distributed.get_backend(full)
    made: Any = distributed.new_subgroups_by_enumeration
    owned, _ = made([list(group) for group in groups], backend=backend)
    try:
        powers = range(_SMALLEST, _LARGEST_OF_GROUPS + 1, _STEP)
        return rising(
            [
                (2**power, all_reduce_seconds(2**power, device=device, group=owned))
                for power in powers
            ]
        )
    finally:
        distributed.destroy_process_group(owned)


def buffers_seconds(module: nn.Module) -> float:
    """Returns the seconds that ranks take to have rank 0's buffers of a module, as DistributedDataParallel sends them before each forward
    pass by default: all of a type in one message. The same on all ranks, which call it together; no buffer changes.
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in module.buffers():
        by_type.setdefault(buffer.dtype, []).append(buffer.detach())
    if not by_type:
        return 0.0
    used = []
    for _ in range(_MANY):
        meet()
        begin = time.perf_counter()
        for buffers in by_type.values():
            message = torch.cat([buffer.flatten() for buffer in buffers])
            distributed.broadcast(message, 0, group=carrying(message.device))
            for buffer, sent in zip(
                buffers, torch.split(message, [item.numel() for item in buffers]), strict=True
            ):
                torch.empty_like(buffer).copy_(sent.view_as(buffer))
            finish(message.device)
        used.append(time.perf_counter() - begin)
    return statistics.median(slowest(used))


def rising(table: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns seconds by bytes of which none fall where bytes rise: the nearest such, by squares, which have the same sum.

    Where cores sleep while ranks wait, an all-reduce of few bytes takes half a millisecond, or three. Which of both the median of some is
    differs from size to size, and in a step buckets of all these sizes take what they take together.
    """
    pooled: list[list[float]] = []
    for _, seconds in table:
        pooled.append([seconds])
        while len(pooled) > 1 and statistics.mean(pooled[-2]) > statistics.mean(pooled[-1]):
            last = pooled.pop()
            pooled[-1] += last
    means = [statistics.mean(pool) for pool in pooled for _ in pool]
    return [(nbytes, seconds) for (nbytes, _), seconds in zip(table, means, strict=True)]


def all_reduce_seconds(
    nbytes: int,
    repeats: int = _REPEATS,
    device: torch.device = CPU,
    group: ProcessGroup | None = None,
) -> float:
    """Returns the median over some repeats of the seconds that an all-reduce takes from when the last rank has come; the same on all ranks,
    which call it together.

    In a step ranks do not come at once: those that are quicker wait, and sleep, and have to wake up. So one rank, in turn, computes a while
    longer than the others.

    Args:
        device: where the values lie.
        group: between whose ranks, of each rank its own; all ranks for None, by the group that gradients on the device go over.
    """
    group = carrying(device) if group is None else group
    values = torch.zeros(nbytes // 4, device=device)
    used = [0.0] * repeats
    owned, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    for index in range(-1, repeats):
        finish(device)
        meet()
        last = index % ranks == owned
        start = time.perf_counter()
        while last and time.perf_counter() < start + _LATE:
            pass
        start = time.perf_counter()
        distributed.all_reduce(values, group=group)
        finish(device)
        if last and index >= 0:
            used[index] = time.perf_counter() - start
    return statistics.median(slowest(used))


def _steadily(nbytes: int, device: torch.device) -> float:
    seconds = all_reduce_seconds(nbytes, device=device)
    return all_reduce_seconds(nbytes, _MANY, device) if seconds < _SHORT else seconds


def finish(device: torch.device) -> None:
    """Returns once a device has done what was queued: NCCL's collectives return as they are queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
