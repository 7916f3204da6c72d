"""Link monitoring: repeated timing of one all-reduce against its prediction.

The time of the all-reduce is dominated by bandwidth rather than latency. It is repeated between
steps without other traffic, so a late rank is not mistaken for a slow link, and plans without
codecs are monitored, too. All ranks measure together and obtain the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from qsync_fx.communication.control_group import CPU
from qsync_fx.distributed.monitoring.drift import Hysteresis, link_drift
from qsync_fx.predictor.replayer.cluster import Cluster
from qsync_fx.profiler.links.collective_times import all_reduce_seconds

_NOTE: Final = "link"
_OUGHT: Final = 0.01
"""Minimum seconds of the probe, well above clock and scheduler noise."""
_LONGEST: Final = 0.5
"""Seconds above which the probe uses fewer bytes."""
_LATENCIES: Final = 3
_REPEATS: Final = 3
_SIZES: Final = tuple(2**power for power in range(12, 27, 2))
_SMALLEST: Final = 2**10
_IN_A_ROW: Final = 2


@dataclass(frozen=True)
class LinkProbe:
    """All-reduce of `nbytes` with its predicted `seconds`; 0 bytes if there is no traffic."""

    nbytes: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster) -> LinkProbe:
        """Return a probe that is sensitive to the bandwidth of a cluster."""
        if cluster.ranks == 1:
            return cls()
        seconds = cluster.all_reduce.seconds(list(map(float, _SIZES)), cluster.ranks).tolist()
        probes = [cls(size, time) for size, time in zip(_SIZES, seconds, strict=True)]
        least = max(_OUGHT, _LATENCIES * seconds[0])
        return next((probe for probe in probes if probe.seconds >= least), probes[-1])

    @classmethod
    def noted(cls, notes: Mapping[str, str]) -> LinkProbe | None:
        """Return the probe in the notes of a plan; None without one."""
        if _NOTE not in notes:
            return None
        nbytes, seconds = notes[_NOTE].split()
        return cls(int(nbytes), float(seconds))

    def notes(self) -> dict[str, str]:
        return {_NOTE: f"{self.nbytes} {self.seconds:.6g}"} if self.nbytes else {}


class ProbedLinks:
    """Link monitor of one training, on one rank.

    Attributes:
        probe: the prediction; None if the plan has none.
    """

    def __init__(
        self, notes: Mapping[str, str], settings: Hysteresis, device: torch.device = CPU
    ) -> None:
        self._settings, self._device = settings, device
        self._resting, self._ratios = 0, list[float]()
        self.probe = LinkProbe.noted(notes)

    def look(self) -> float | None:
        """Measure on all ranks at once; call it every `patience` steps.

        Return measured over predicted seconds if links have changed; None otherwise.
        """
        if self.probe is None:
            return None
        if self._resting > 0:
            self._resting -= self._settings.patience
            return None
        seconds = all_reduce_seconds(self.probe.nbytes, _REPEATS, self._device)
        self._ratios = [*self._ratios, seconds / self.probe.seconds][-_IN_A_ROW:]
        if len(self._ratios) < _IN_A_ROW:
            return None
        return link_drift(self._ratios, self._settings)

    def decided(self, ratio: float | None) -> None:
        """Start the cooldown after a decision; scale the prediction by `ratio` if links changed."""
        self._resting, self._ratios = self._settings.cooldown, []
        if self.probe is not None and ratio is not None:
            nbytes, seconds = self.probe.nbytes, self.probe.seconds * ratio
            while seconds > _LONGEST and nbytes > _SIZES[0]:
                nbytes, seconds = nbytes // 4, seconds / 4
            self.probe = LinkProbe(nbytes, seconds)

    def table(self) -> list[tuple[int, float]]:
        """Measure all-reduces up to the size of the probe, on all ranks: (bytes, seconds)."""
        if self.probe is None:
            return []
        sizes = [size for size in (_SMALLEST, *_SIZES) if size <= self.probe.nbytes]
        return [(size, all_reduce_seconds(size, _REPEATS, self._device)) for size in sizes]
