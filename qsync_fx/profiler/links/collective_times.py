"""Durations of all-reduces by message size, and of the broadcast of a model's buffers.

`last_rank_seconds` is the time measurement of all collectives.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from qsync_fx.communication.control_group import CPU, backend_of, carrying, meet, slowest
from qsync_fx.profiler.profile import Collective

_SMALLEST, _LARGEST, _STEP = 10, 26, 2
"""Range of the message sizes as powers of two: 1 KiB to 64 MiB."""
REPEATS = 5
SHORT, MANY = 0.02, 21
"""Collectives below 0.02 s are repeated 21 times, as sleeping cores delay some by milliseconds."""

_LATE = 0.005
"""Seconds by which one rank arrives later than the others."""


def collectives(device: torch.device = CPU, many: int = MANY) -> list[Collective]:
    """Measure all-reduces of FP32 values on all ranks at once; none for a single rank.

    Short ones are repeated `many` times.
    """
    if (count := ranks()) == 1:
        return []
    table = []
    for power in range(_SMALLEST, _LARGEST + 1, _STEP):
        seconds = all_reduce_seconds(2**power, device=device)
        if seconds < SHORT and many > REPEATS:
            seconds = all_reduce_seconds(2**power, many, device)
        table.append((2**power, seconds))
    backend = backend_of(device, carrying(device))
    assert backend is not None, "the all-reduces above ran on it"
    return [Collective(backend, count, rising(table))]


def ranks() -> int:
    """Return the number of ranks; 1 if torch.distributed is not initialized."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def buffers_seconds(module: nn.Module) -> float:
    """Return the seconds to broadcast a module's buffers from rank 0; equal on all ranks.

    DistributedDataParallel does this before each forward pass, one message per dtype. All ranks
    call this together; no buffer changes.
    """
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in module.buffers():
        by_type.setdefault(buffer.dtype, []).append(buffer.detach())
    if not by_type:
        return 0.0
    used = []
    for _ in range(MANY):
        meet()
        begin = time.perf_counter()
        for buffers in by_type.values():
            message = torch.cat([buffer.flatten() for buffer in buffers])
            distributed.broadcast(message, 0, group=carrying(message.device))
            sent = torch.split(message, [item.numel() for item in buffers])
            for buffer, values in zip(buffers, sent, strict=True):
                torch.empty_like(buffer).copy_(values.view_as(buffer))
            finish(message.device)
        used.append(time.perf_counter() - begin)
    return statistics.median(slowest(used))


def rising(table: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the isotonic regression of seconds over bytes, by pooling adjacent violators.

    It removes noise: while ranks wait, cores sleep, and a small all-reduce needs 0.5 ms or 3 ms by
    chance, but a step sends buckets of many sizes.
    """
    pooled: list[list[float]] = []
    for _, seconds in table:
        pooled.append([seconds])
        while len(pooled) > 1 and statistics.mean(pooled[-2]) > statistics.mean(pooled[-1]):
            last = pooled.pop()
            pooled[-1] += last
    means = [statistics.mean(pool) for pool in pooled for _ in pool]
    return [(nbytes, seconds) for (nbytes, _), seconds in zip(table, means, strict=True)]


def all_reduce_seconds(nbytes: int, repeats: int = REPEATS, device: torch.device = CPU) -> float:
    """Return the median seconds of an all-reduce of FP32 values; see `last_rank_seconds`."""
    group, values = carrying(device), torch.zeros(nbytes // 4, device=device)
    call = partial(distributed.all_reduce, values, group=group)
    return last_rank_seconds(call, repeats, device, group)


def last_rank_seconds(
    collective: Callable[[], object],
    repeats: int,
    device: torch.device,
    group: ProcessGroup | None,
) -> float:
    """Return the median seconds of a collective after the last rank arrives; equal on all ranks.

    In a step, ranks arrive at different times; the early ones sleep and have to wake up. So each
    rank of a group in turn computes for `_LATE` seconds more than the others. All ranks call this
    together, each for its own group; seconds are the slowest rank's.
    """
    used = [0.0] * repeats
    owned, count = distributed.get_rank(group), distributed.get_world_size(group)
    for index in range(-1, repeats):
        finish(device)
        meet()
        last = index % count == owned
        start = time.perf_counter()
        while last and time.perf_counter() < start + _LATE:
            pass
        start = time.perf_counter()
        collective()
        finish(device)
        if last and index >= 0:
            used[index] = time.perf_counter() - start
    return statistics.median(slowest(used))


def finish(device: torch.device) -> None:
    """Wait for a device's queued work, since NCCL collectives return when they are queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
