"""Tells a rank's computing from its waiting for the other, and what of it other processes of the machine have taken.

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
    """Seconds of every step: `computing` and `waiting`, and `processor`, which is computing by the processor's clock."""

    def __init__(self) -> None:
        self.computing: list[float] = []
        self.waiting: list[float] = []
        self.processor: list[float] = []
        self._started, self._handed, self._reduced = _now(), _now(), _now()

    def hand_over(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook: averages the gradients of a bucket over the ranks."""
        self._handed = _now()
        buffer = bucket.buffer().div_(WORLD)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def start(self) -> None:
        """A step begins."""
        self._started = _now()

    def reduced(self) -> None:
        """The averaged gradients of the step are there."""
        self._reduced = _now()

    def end(self) -> None:
        """The weights are updated: notes the step."""
        ended = _now()
        self.waiting.append(self._reduced[0] - self._handed[0])
        computing, processor = (
            self._handed[at] - self._started[at] + ended[at] - self._reduced[at]
            for at in range(len(ended))
        )
        self.computing.append(computing)
        self.processor.append(processor)

    def medians(self) -> dict[str, float] | None:
        """Returns the medians over the steps after the first ones; None where there are none."""
        computing, waiting, processor = (
            one[WARM_UP:] for one in (self.computing, self.waiting, self.processor)
        )
        if not computing:
            return None
        seconds = [sum(both) for both in zip(computing, waiting, strict=True)]
        found = {
            "seconds": seconds,
            "computing": computing,
            "waiting": waiting,
            "processor": processor,
        }
        return {name: statistics.median(steps) for name, steps in found.items()}


def _now() -> tuple[float, float]:
    """Returns the time on the wall, and that which this process has had of processors."""
    return time.perf_counter(), time.process_time()
