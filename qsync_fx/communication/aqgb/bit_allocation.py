"""AQGB's control of how many bits a gradient is sent in (X. Liu et al., 2022): as many as the link takes away while gradients come.

Gradients come in blocks, and each should be delivered before the next one comes, the last before a deadline. When a block comes, what is
undelivered over the time until the next one is the rate at which gradients are made (b1), and what was sent so far over the time
since the first block the rate at which the link takes them (b2). Their ratio is that of bytes to FP32 which is wanted, and two neighbouring
levels are mixed to meet it.

Invariant: pure functions; bytes sent are those on the wire. What is undelivered may have come before: it is sent by the newest ratio.
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
    """Gradients that come at once: so many bytes of FP32, so many seconds after the step began."""

    size: float
    ready: float


@dataclass(frozen=True)
class BitDecision:
    """What is decided when a block comes.

    Attributes:
        time: when.
        undelivered: bytes of FP32.
        made, drained: b1 and b2, in bytes a second.
        ratio: of bytes sent to bytes of FP32, from 0.375 to 1.
    """

    time: float
    undelivered: float
    made: float
    drained: float
    ratio: float

    @property
    def wanted(self) -> float:
        """The ratio before it is cut to what levels there are."""
        return self.drained / self.made


@dataclass(frozen=True)
class Broadcast:
    """What became of the blocks of a step.

    Attributes:
        decisions: one a block.
        busy: from when to when the link was used.
        sent: bytes.
    """

    decisions: tuple[BitDecision, ...]
    busy: tuple[tuple[float, float], ...]
    sent: float

    @property
    def end(self) -> float:
        return self.busy[-1][1]

    def overlap(self, until: float) -> float:
        """Returns the share of the time on the link that lies before `until`."""
        return sum(max(0.0, min(end, until) - begin) for begin, end in self.busy) / sum(
            end - begin for begin, end in self.busy
        )


def decide(time: float, undelivered: float, gap: float, drained: float) -> BitDecision:
    """Returns the decision for a block; `gap` is the time from it to the next one, `drained` the rate of the link so far."""
    made = undelivered / gap
    return BitDecision(time, undelivered, made, drained, min(1.0, max(LEAST, drained / made)))


def mixed(ratio: float) -> dict[int, float]:
    """Returns the share of values that goes in each level, so that all of them take `ratio` of FP32's bytes: two neighbours, or one."""
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
    """Returns what becomes of the blocks of a step on a link.

    Args:
        blocks: in the order in which they come.
        deadline: when the last of them should be delivered.
        rate: bytes a second that the link takes, at a time.
        changes: the times at which that changes.
        adaptive: whether the controller decides; if not, all goes in FP32.
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
