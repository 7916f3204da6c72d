"""AQGB's bit allocation (X. Liu et al., 2022): as few bits as the link needs to hide the transfer.

Each block of gradients should be delivered before the next one is ready, and the last before a
deadline. When a block is ready, b1 = undelivered bytes / time until the next block is the rate of
new gradients, and b2 = bytes sent / time since the first block the rate of the link. b2 / b1 is the
target ratio of sent bytes to FP32 bytes; a mix of two adjacent levels meets it.

Invariant: pure functions. Bytes sent are bytes on the wire. The newest ratio also applies to
undelivered bytes of earlier blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.communication.codecs.truncation import LEVELS

_FULL: Final = 32
LEAST: Final = LEVELS[0] / _FULL


@dataclass(frozen=True)
class Block:
    """Block of gradients: FP32 bytes, and seconds after the start of the step when it is ready."""

    size: float
    ready: float


@dataclass(frozen=True)
class BitDecision:
    """Decision for a block.

    Attributes:
        time: seconds, when the block was ready.
        undelivered: FP32 bytes.
        made, drained: b1 and b2, in bytes/s.
        ratio: sent bytes to FP32 bytes, from 0.375 to 1.
    """

    time: float
    undelivered: float
    made: float
    drained: float
    ratio: float

    @property
    def wanted(self) -> float:
        """The ratio before it is clamped to the range of levels."""
        return self.drained / self.made


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


def decide(time: float, undelivered: float, gap: float, drained: float) -> BitDecision:
    """Return the decision for a block.

    Args:
        time: now, in seconds.
        undelivered: FP32 bytes.
        gap: seconds until the next block.
        drained: link rate so far, in bytes/s.
    """
    made = undelivered / gap
    return BitDecision(time, undelivered, made, drained, min(1.0, max(LEAST, drained / made)))


def mixed(ratio: float) -> dict[int, float]:
    """Return the share of values for each level so that their bytes are `ratio` of FP32.

    The result has one level or two adjacent ones.
    """
    bits = ratio * _FULL
    below = max(level for level in LEVELS if level <= max(bits, LEVELS[0]))
    above = min(level for level in LEVELS if level >= min(bits, LEVELS[-1]))
    if below == above:
        return {below: 1.0}
    share = (bits - below) / (above - below)
    return {below: 1 - share, above: share}


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
