"""What links between ranks take now, beside what a plan foresees.

An all-reduce of a size that its bytes, and not its latency, take time for is foreseen with the plan and taken again now and then, between
two steps, when nothing else travels: so a rank that is late does not pass for a slow link, and a plan that compresses nothing is watched,
too.

Invariant: all ranks measure together, and know the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from qsync_fx.communication.control_group import CPU
from qsync_fx.distributed.monitoring.drift import Hysteresis, link_drift
from qsync_fx.predictor.replayer.cluster import Cluster
from qsync_fx.profiler.links.collective_times import all_reduce_seconds

_NOTE: Final = "link"
_OUGHT: Final = 0.01
"""Seconds that what is measured ought to take, for clocks and schedulers not to matter."""
_LONGEST: Final = 0.5
"""Seconds beyond which fewer bytes are measured."""
_LATENCIES: Final = 3
_REPEATS: Final = 3
_SIZES: Final = tuple(2**power for power in range(12, 27, 2))
_SMALLEST: Final = 2**10
_IN_A_ROW: Final = 2


@dataclass(frozen=True)
class LinkProbe:
    """An all-reduce, and the seconds that it is foreseen to take; of no bytes where nothing travels."""

    nbytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster) -> LinkProbe:
        """Returns one that tells the links of a cluster."""
        if cluster.ranks == 1:
            return cls()
        used = cluster.all_reduce.seconds([float(size) for size in _SIZES], cluster.ranks).tolist()
        long = max(_OUGHT, _LATENCIES * used[0])
        return next(
            (cls(size, time) for size, time in zip(_SIZES, used, strict=True) if time >= long),
            cls(_SIZES[-1], used[-1]),
        )

    @classmethod
    def noted(cls, notes: Mapping[str, str]) -> LinkProbe | None:
        """Returns what `notes` of a plan say; None where they say nothing."""
        if _NOTE not in notes:
            return None
        nbytes, seconds = notes[_NOTE].split()
        return cls(int(nbytes), float(seconds))

    def notes(self) -> dict[str, str]:
        """Returns what a plan says of it."""
        return {_NOTE: f"{self.nbytes} {self.seconds:.6g}"} if self.nbytes else {}


class ProbedLinks:
    """The links of one training, on one rank.

    Args:
        notes: of the plan in force.
        device: where gradients lie.

    Attributes:
        probe: what is foreseen; None where nothing is known.
    """

    def __init__(
        self, notes: Mapping[str, str], settings: Hysteresis, device: torch.device = CPU
    ) -> None:
        self._how, self._device = settings, device
        self._resting, self._ratios = 0, list[float]()
        self.probe = LinkProbe.noted(notes)

    def look(self) -> float | None:
        """Measures, on all ranks at once, after every `patience` steps; returns measured over foreseen seconds where links have changed."""
        if self.probe is None:
            return None
        if self._resting > 0:
            self._resting -= self._how.patience
            return None
        seconds = all_reduce_seconds(self.probe.nbytes, _REPEATS, self._device)
        self._ratios = [*self._ratios, seconds / self.probe.seconds][-_IN_A_ROW:]
        return link_drift(self._ratios, self._how) if len(self._ratios) == _IN_A_ROW else None

    def decided(self, ratio: float | None) -> None:
        """Goes on from a decision, and from what links were found to take, if they were why."""
        self._resting, self._ratios = self._how.cooldown, []
        if self.probe is not None and ratio is not None:
            result = replace(self.probe, seconds=self.probe.seconds * ratio)
            while result.seconds > _LONGEST and result.nbytes > _SIZES[0]:
                result = LinkProbe(result.nbytes // 4, result.seconds / 4)
            self.probe = result

    def table(self) -> list[tuple[int, float]]:
        """Measures, on all ranks at once, how long all-reduces take, up to the size that is looked at."""
        largest = 0 if self.probe is None else self.probe.nbytes
        return [
            (size, all_reduce_seconds(size, _REPEATS, self._device))
            for size in (_SMALLEST, *_SIZES)
            if size <= largest
        ]
