"""How long copies within a device take, and all-reduces between devices."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from qsync_fx.devices.constants import Link, Memory, Reduction


def moved(by: Memory, size: float) -> float:
    """Returns the seconds in which `size` bytes are read and written: the launch, what the cache holds, and the rest through memory."""
    cached = min(size, by.cache) if by.cache_bandwidth else 0.0
    seconds = (size - cached) / (by.bandwidth * by.fraction)
    return max(by.launch, seconds + (cached / by.cache_bandwidth if cached else 0.0))


def reduced(measured: Sequence[Reduction], link: Link | None, size: float, ranks: int) -> float | None:
    """Returns the seconds of an all-reduce of `size` bytes over `ranks` devices of one server; None where nothing is known.

    Where it was not measured over so many, the nearest number of devices that was stands in: each of n devices sends 2 (n - 1) / n of the
    bytes.
    """
    if ranks == 1 or size == 0:
        return 0.0
    if measured:
        nearest = min(measured, key=lambda one: (abs(math.log(one.ranks / ranks)), one.ranks))
        share = _sent(ranks) / _sent(nearest.ranks)
        return interpolated(nearest.bytes, nearest.seconds, size * share)
    if link is None:
        return None
    return 2 * (ranks - 1) * link.latency + _sent(ranks) * size / link.bandwidth


def _sent(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def interpolated(at: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Returns the value at `size` of straight lines between points in logarithms; it is constant below, and proportional beyond."""
    if size <= at[0]:
        return seconds[0]
    if size >= at[-1]:
        return seconds[-1] * size / at[-1]
    right = bisect_right(at, size)
    left = right - 1
    along = math.log(size / at[left]) / math.log(at[right] / at[left])
    return seconds[left] * math.pow(seconds[right] / seconds[left], along)
