"""Simulation of AQGB (X. Liu et al., 2022) on a link: when the blocks of a step are delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qsync_fx.communication.aqgb import BitDecision, decide


@dataclass(frozen=True)
class Block:
    """Block of gradients: FP32 bytes, and seconds after the start of the step when it is ready."""

    size: float
    ready: float


@dataclass(frozen=True)
class Broadcast:
    """Simulated transmission of the blocks of a step.

    Attributes:
        decisions: one for each block.
        busy: begin and end of each interval in which the link was used, in seconds.
        sent: bytes.
    """

    decisions: tuple[BitDecision, ...]
    busy: tuple[tuple[float, float], ...]
    sent: float

    @property
    def end(self) -> float:
        return self.busy[-1][1]

    def overlap(self, until: float) -> float:
        """Return the share of link time before `until`."""
        return sum(max(0.0, min(end, until) - begin) for begin, end in self.busy) / sum(
            end - begin for begin, end in self.busy
        )


def broadcast(
    blocks: Sequence[Block],
    deadline: float,
    rate: Callable[[float], float],
    changes: Sequence[float] = (),
    adaptive: bool = True,
) -> Broadcast:
    """Simulate the transmission of a step's blocks on a link.

    Args:
        blocks: in order of readiness.
        deadline: time when the last block should be delivered.
        rate: link bandwidth in bytes/s at a time.
        changes: times when the bandwidth changes.
        adaptive: whether decisions apply; if not, all bytes are FP32.
    """
    first = blocks[0].ready
    comings = [block.ready for block in blocks]
    decisions: list[BitDecision] = []
    busy: list[tuple[float, float]] = []
    undelivered, sent, ratio, now = 0.0, 0.0, 1.0, first
    later = sorted({*comings, *(change for change in changes if change > first)})
    while True:
        if now in comings:
            index = comings.index(now)
            undelivered += blocks[index].size
            until = comings[index + 1] if index + 1 < len(blocks) else deadline
            drained = sent / (now - first) if now > first else rate(first)
            decisions.append(decide(now, undelivered, until - now, drained))
            ratio = decisions[-1].ratio if adaptive else 1.0
        following = next((time for time in later if time > now), None)
        if undelivered > 0:
            end = now + undelivered * ratio / rate(now)
            stop = end if following is None else min(end, following)
            busy.append((now, stop))
            sent += (stop - now) * rate(now)
            undelivered = 0.0 if stop == end else undelivered - (stop - now) * rate(now) / ratio
        if following is None:
            return Broadcast(tuple(decisions), tuple(busy), sent)
        now = following
