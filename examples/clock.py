"""Division of a rank's step time into computing and waiting, and the CPU time of computing.

Waiting is the time from the all-reduce of the last gradient bucket until the backward pass returns.
The rest of the step is computing, including computation that overlaps with earlier all-reduces. CPU
time below computing time shows that other processes used the core.
"""

# No `from __future__ import annotations`: DDP inspects the annotations of a communication hook,
# which must not be strings.

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from messages import WARM_UP, WORLD

_PARTS = 8
"""Parts of a training whose medians are compared with each other."""


class Clock:
    """Seconds of each step: `computing`, `waiting`, and `processor`, the CPU time of computing."""

    def __init__(self) -> None:
        self.computing: list[float] = []
        self.waiting: list[float] = []
        self.processor: list[float] = []
        self._started, self._handed, self._reduced = _now(), _now(), _now()

    def hand_over(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Average the gradients of a bucket over the ranks (DDP communication hook)."""
        self._handed = _now()
        buffer = bucket.buffer().div_(WORLD)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def start(self) -> None:
        """Record the start of a step."""
        self._started = _now()

    def reduced(self) -> None:
        """Record that the averaged gradients of the step are available."""
        self._reduced = _now()

    def end(self) -> None:
        """Record the end of a step, after the weight update."""
        ended = _now()
        self.waiting.append(self._reduced[0] - self._handed[0])
        computing, processor = (
            self._handed[index] - self._started[index] + ended[index] - self._reduced[index]
            for index in range(len(ended))
        )
        self.computing.append(computing)
        self.processor.append(processor)

    def medians(self) -> dict[str, float] | None:
        """Return the medians over the steps after the warm-up; None if there are no such steps.

        "noise" is the standard deviation of the medians of consecutive parts of the training.
        """
        computing, waiting, processor = (
            series[WARM_UP:] for series in (self.computing, self.waiting, self.processor)
        )
        if not computing:
            return None
        seconds = [sum(both) for both in zip(computing, waiting, strict=True)]
        result = {
            "seconds": seconds,
            "computing": computing,
            "waiting": waiting,
            "processor": processor,
        }
        medians = {name: statistics.median(steps) for name, steps in result.items()}
        return medians | {"noise": _noise(seconds)}


def _noise(seconds: Sequence[float]) -> float:
    length = max(1, len(seconds) // _PARTS)
    starts = range(0, len(seconds) - length + 1, length)
    return statistics.pstdev(statistics.median(seconds[start : start + length]) for start in starts)


def _now() -> tuple[float, float]:
    """Return wall time and CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()
