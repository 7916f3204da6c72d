"""AQGB's controller: measures gradients and link, and sets the ratio of sent bytes to FP32 bytes.

The time from a block to the next one, or from the last one to the end of the backward pass, is
predicted as the median of recent steps with the same blocks.

Invariant: decisions depend only on bytes and on times of its clock. Everything is FP32 until a step
is complete and a transfer is measured. Each rank decides for its own messages.
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
"""Number of past steps for the prediction."""
_LOG: Final = 10_000
_SHORTEST: Final = 1e-6
"""Shortest time in seconds, so that simultaneous blocks have a finite rate."""


@dataclass(frozen=True)
class AqgbEntry:
    """Log entry of a block.

    Attributes:
        step: step of the training.
        block: index in the step.
        size: FP32 bytes of the block.
        gap: predicted seconds until the next block; None without a past step with these blocks.
        decision: decision, with time relative to the first block; None if an input is unknown,
            which means FP32.
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
    """Summary of a controller's decisions so far.

    Attributes:
        decisions: their number.
        levels: share of all sent values by number of bits.
        rate: link bandwidth in bytes/s in the last step with transfers; None before.
    """

    decisions: int
    levels: Mapping[int, float]
    rate: float | None

    def __str__(self) -> str:
        shares = ", ".join(
            f"{share:.1%} in {bits} bits" for bits, share in sorted(self.levels.items())
        )
        rate = (
            "link bandwidth not measured yet"
            if self.rate is None
            else f"link bandwidth {self.rate / 1e6:.1f} MB/s"
        )
        return f"{self.decisions} decisions: {shares or 'no data sent'}; {rate}"


@dataclass
class _Step:
    number: int
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    needed: float | None = None
    wire: float = 0.0
    busy: float = 0.0


class Controller:
    """Controller of one rank.

    Args:
        grace: seconds after the backward pass until the deadline of the last block.
        elapsed: whether the link rate includes idle time, as in the paper.

    Attributes:
        ratio: sent bytes to FP32 bytes, by the newest decision.
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
        """Record a block of `size` FP32 bytes that is ready, and decide its ratio."""
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
        """Record a transfer.

        Args:
            delivered: FP32 bytes.
            wire: bytes on the wire.
            seconds: duration.
            levels: number of values by bits.
        """
        with self._lock:
            self._undelivered -= delivered
            self._now.wire += wire
            self._now.busy += seconds
            self._levels.update(levels)

    def needed(self) -> None:
        """Record the end of the backward pass, which now waits for all blocks."""
        with self._lock:
            if self._now.needed is None:
                self._now.needed = self.clock()

    def adapted(self) -> Adapted:
        with self._lock:
            values = sum(self._levels.values())
            levels = {bits: count / values for bits, count in self._levels.items()}
            return Adapted(self._decisions, levels, self._last_rate())

    def saved(self) -> dict[str, Any]:
        """Return the link rate and block times of past steps."""
        with self._lock:
            self._end()
            return {
                "rate": self._rate,
                "past": [[list(sizes), list(gaps)] for sizes, gaps in self._past],
            }

    def load(self, saved: Mapping[str, Any]) -> None:
        with self._lock:
            self._rate = saved.get("rate")
            self._past = deque(
                ((list(sizes), list(gaps)) for sizes, gaps in saved.get("past", ())), maxlen=_STEPS
            )
            self._now = _Step(-1)

    def _end(self) -> None:
        ended, self._now = self._now, _Step(-1)
        self._rate = ended.wire / ended.busy if ended.busy > 0 else self._rate
        if ended.needed is not None and ended.times:
            until = [*ended.times[1:], max(ended.needed, ended.times[-1]) + self._grace]
            gaps = [end - begin for begin, end in zip(ended.times, until, strict=True)]
            self._past.append((ended.sizes, gaps))

    def _foreseen(self) -> float | None:
        """Return the predicted seconds from the newest block to the next one."""
        sizes, place = self._now.sizes, len(self._now.sizes) - 1
        gaps = [gaps[place] for past, gaps in self._past if _begins(past, sizes)]
        return max(statistics.median(gaps), _SHORTEST) if gaps else None

    def _drained(self, now: float) -> float | None:
        """Return the link rate of this step in bytes/s; before a transfer, of the last step."""
        step = self._now
        if self._elapsed and step.wire > 0:
            return step.wire / max(now - step.times[0], _SHORTEST)
        return self._last_rate()

    def _last_rate(self) -> float | None:
        return self._now.wire / self._now.busy if self._now.busy > 0 else self._rate


def _begins(sizes: Sequence[int], beginning: Sequence[int]) -> bool:
    return list(sizes[: len(beginning)]) == list(beginning)
