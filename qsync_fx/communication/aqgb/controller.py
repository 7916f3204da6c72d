"""AQGB's controller at work: it sees when gradients come and what the link takes of them, and says what is sent of them by now.

When a block comes, the time until the next one, or after the last one until the backward pass is over, is foreseen from the steps before:
the median of the last few in which the same blocks came.

Invariant: what it decides follows from bytes and from times that its clock gave, and from nothing else. Until a step has been seen and
something has been sent, all goes in FP32. A rank decides for what it sends itself.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from qsync_fx.communication.aqgb.bit_allocation import BitDecision, decide

_STEPS: Final = 5
"""How many steps the next one is foreseen from."""
_LOG: Final = 10_000
_SHORTEST: Final = 1e-6
"""Seconds: blocks that come at once have a rate, too."""


@dataclass(frozen=True)
class AqgbEntry:
    """One block in the log.

    Attributes:
        step: of the training.
        block: its place in the step.
        size: bytes of FP32 that came.
        gap: seconds foreseen until the next block; None where no step before had these blocks.
        decision: what was decided, its time counted from the step's first block; None where something it takes is not known yet, and
            FP32 is sent.
    """

    step: int
    block: int
    size: int
    gap: float | None
    decision: BitDecision | None

    @property
    def ratio(self) -> float:
        return 1.0 if self.decision is None else self.decision.ratio


@dataclass(frozen=True)
class Adapted:
    """What a controller has done so far.

    Attributes:
        decisions: how many.
        levels: of all values sent, the share of each number of bits.
        rate: bytes a second that the link took in the last step that sent any; None before.
    """

    decisions: int
    levels: Mapping[int, float]
    rate: float | None

    def __str__(self) -> str:
        shares = ", ".join(
            f"{share:.1%} in {bits} bits" for bits, share in sorted(self.levels.items())
        )
        rate = (
            "the link is not measured yet"
            if self.rate is None
            else f"the link takes {self.rate / 1e6:.1f} MB/s"
        )
        return f"{self.decisions} decisions: {shares or 'nothing sent'}; {rate}"


@dataclass
class _Step:
    number: int
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    needed: float | None = None
    wire: float = 0.0
    busy: float = 0.0


class Controller:
    """Attributes:
    ratio: of bytes sent to bytes of FP32, by the newest decision.
    log: the newest blocks.
    """

    def __init__(
        self,
        grace: float = 0.0,
        elapsed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ratio = 1.0
        self.log: deque[AqgbEntry] = deque(maxlen=_LOG)
        self.clock = clock
        self._grace, self._elapsed = grace, elapsed
        self._lock = threading.Lock()
        self._undelivered = 0
        self._rate: float | None = None
        self._past: deque[tuple[list[int], list[float]]] = deque(maxlen=_STEPS)
        self._now = _Step(-1)
        self._levels: Counter[int] = Counter()
        self._decisions = 0

    def came(self, step: int, size: int) -> None:
        """Sees a block of so many bytes of FP32, and decides."""
        with self._lock:
            now = self.clock()
            if step != self._now.number:
                self._end()
                self._now = _Step(step)
            self._now.sizes.append(size)
            self._now.times.append(now)
            self._undelivered += size
            gap, drained = self._foreseen(), self._drained(now)
            decision = None
            if gap is not None and drained is not None:
                decision = decide(now - self._now.times[0], self._undelivered, gap, drained)
                self._decisions += 1
            self.log.append(AqgbEntry(step, len(self._now.sizes) - 1, size, gap, decision))
            self.ratio = self.log[-1].ratio

    def carried(
        self, delivered: int, wire: float, seconds: float, levels: Mapping[int, int]
    ) -> None:
        """Sees that so many bytes of FP32 are delivered, in so many on the wire and so many seconds, by how many values of which level."""
        with self._lock:
            self._undelivered -= delivered
            self._now.wire += wire
            self._now.busy += seconds
            self._levels.update(levels)

    def needed(self) -> None:
        """Sees that the backward pass is over: from now on all blocks are waited for."""
        with self._lock:
            if self._now.needed is None:
                self._now.needed = self.clock()

    def adapted(self) -> Adapted:
        """Returns what was done so far."""
        with self._lock:
            values = sum(self._levels.values())
            levels = {bits: count / values for bits, count in self._levels.items()}
            return Adapted(self._decisions, levels, self._last_rate())

    def saved(self) -> dict[str, Any]:
        """Returns what the next step is foreseen from."""
        with self._lock:
            self._end()
            return {
                "rate": self._rate,
                "past": [[list(sizes), list(gaps)] for sizes, gaps in self._past],
            }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `saved` returned."""
        with self._lock:
            self._rate = saved.get("rate")
            self._past = deque(
                ((list(sizes), list(gaps)) for sizes, gaps in saved.get("past", ())), maxlen=_STEPS
            )
            self._now = _Step(-1)

    def _end(self) -> None:
        """Remembers the step that is over."""
        ended, self._now = self._now, _Step(-1)
        self._rate = ended.wire / ended.busy if ended.busy > 0 else self._rate
        if ended.needed is not None and ended.times:
            until = [*ended.times[1:], max(ended.needed, ended.times[-1]) + self._grace]
            gaps = [end - begin for begin, end in zip(ended.times, until, strict=True)]
            self._past.append((ended.sizes, gaps))

    def _foreseen(self) -> float | None:
        """Returns the seconds from the block that has just come to the next one."""
        sizes, place = self._now.sizes, len(self._now.sizes) - 1
        gaps = [gaps[place] for past, gaps in self._past if _begins(past, sizes)]
        return max(statistics.median(gaps), _SHORTEST) if gaps else None

    def _drained(self, now: float) -> float | None:
        """Returns the bytes a second that the link has taken since the step's first block; those of the step before if it has had none."""
        step = self._now
        if self._elapsed and step.wire > 0:
            return step.wire / max(now - step.times[0], _SHORTEST)
        return self._last_rate()

    def _last_rate(self) -> float | None:
        return self._now.wire / self._now.busy if self._now.busy > 0 else self._rate


def _begins(sizes: Sequence[int], beginning: Sequence[int]) -> bool:
    return list(sizes[: len(beginning)]) == list(beginning)
