"""Tells a rank's computing from its waiting for the other.

Invariant: the two add up to the whole step. The wait is the time from when the rank hands its last gradient bucket to all-reduce until
the backward pass returns with the averages. Everything else is computing, also what overlaps with the reduction of earlier buckets.
"""

# DDP reads the annotations of a communication hook, so they must not be texts: no `from __future__ import annotations`.

import statistics
import time

import torch
import torch.distributed as dist
from messages import WARM_UP, WORLD


class Clock:
    """Seconds of every step: `computing` and `waiting`."""

    def __init__(self) -> None:
        self.computing: list[float] = []
        self.waiting: list[float] = []
        self._handed = 0.0

    def hand_over(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook: averages the gradients of a bucket over the ranks."""
        self._handed = time.perf_counter()
        buffer = bucket.buffer().div_(WORLD)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def step(self, started: float, reduced: float, ended: float) -> None:
        """Notes a step by when it started, when the averaged gradients were there, and when the weights were updated."""
        waited = reduced - self._handed
        self.waiting.append(waited)
        self.computing.append(ended - started - waited)

    @staticmethod
    def median(seconds: list[float]) -> float | None:
        return statistics.median(seconds[WARM_UP:]) if len(seconds) > WARM_UP else None
