"""How long a step takes with compressed gradients, from how long it takes without.

    seconds = seconds without - travel * (bytes without - bytes) + coding * elements

Two numbers say all of a way to exchange gradients, at a number of devices: what a byte of gradients takes to travel beyond what computing
hides, and what an element takes more, whatever its width: to be compressed and back, less what is done to full gradients alone. The step
without compression says the rest: computing, at the batch that a device then has, and what of it runs beside communication.

`EXCHANGES` has them for the machines of D. Grubic et al., "Synchronous Multi-GPU Deep Learning with Low-Precision Communication: An
Experimental Study", EDBT 2018: K80 GPUs of Amazon EC2 (p2), figures 10 and 11, rows of QSGD. `communication_study.py`
in benchmarks/published fits them, and says how far off they are for networks that they were not fitted to.

Invariant: fitting minimises the mean of relative errors, so that a misprint in a table moves nothing.

How long an all-reduce takes: by bandwidth and latency of the slowest link, in two levels, or by a table that was measured.

Invariant: more bytes take no less time, whatever the table says between its points, and no bytes take none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np

from qsync_fx.errors import ProfileError
from qsync_fx.predictor.replayer.device_timeline import Array

_PHASES: Final = 2
"""Of an all-reduce: parts are summed, and the sums are sent to all."""


class AllReduce(Protocol):
    """How long an all-reduce takes."""

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        """Returns the seconds for each number of bytes that every one of the ranks gives, where that takes two phases, or fewer."""


@dataclass(frozen=True)
class CollectiveLink:
    """A ring: each rank sends and receives 2 (ranks - 1) / ranks of the bytes.

    Attributes:
        bandwidth: bytes a second, in one direction, of the slowest link.
        latency: seconds that the smallest all-reduce takes, in equal parts in each phase.
    """

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        sizes = np.asarray(nbytes, dtype=float)
        latency = self.latency * phases / _PHASES
        used: Array = np.where(sizes > 0, latency + share(ranks) * sizes / self.bandwidth, 0.0)
        return used if ranks > 1 else np.zeros_like(sizes)


@dataclass(frozen=True)
class MeasuredCollectives:
    """A table, interpolated where both axes are logarithms.

    Below its smallest all-reduce the time is that one's, which is latency; above its largest it goes on in proportion to the bytes. What
    of it is latency a table does not say, so that one phase is taken to have that of two.

    Attributes:
        table: pairs of bytes and seconds.
        ranks: how many ranks took part.
    """

    table: Sequence[tuple[float, float]]
    ranks: int

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        sizes = np.asarray(nbytes, dtype=float)
        if ranks < 2:
            return np.zeros_like(sizes)
        points = np.array(sorted(self.table), dtype=float)
        points[:, 1] = np.maximum.accumulate(points[:, 1])
        within = np.clip(sizes, points[0, 0], points[-1, 0])
        used = np.exp(np.interp(np.log(within), np.log(points[:, 0]), np.log(points[:, 1])))
        beyond = np.maximum(sizes / points[-1, 0], 1)
        scaled: Array = np.where(sizes > 0, used * beyond * share(ranks) / share(self.ranks), 0.0)
        return scaled


@dataclass(frozen=True)
class Levels:
    """Inside each of M nodes its s ranks sum a part of its gradients each; the ranks of all nodes that have the same part average it; and
    each gives its mean to the others of its node. With P bytes given,

        seconds = latency inside + 2 (s - 1)/s P/inside + latency across + 2 (M - 1)/M P/across

    as each rank of a node averages an s-th, and all of them send over the same link. H. Mikami et al., "Massively Distributed SGD", 2018;
    M. Cho et al., "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy", MLSys 2019.

    Attributes:
        across: between nodes, over the link that the ranks of a node share.
        inside: between the ranks of a node.
        size: ranks of a node.
    """

    across: AllReduce
    inside: AllReduce
    size: int

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        """Returns the seconds where each rank gives so many bytes. Phases are those between nodes: inside there are two."""
        within = self.inside.seconds(nbytes, self.size)
        result: Array = within + self.across.seconds(nbytes, ranks // self.size, phases)
        return result


def share(ranks: int) -> float:
    """Returns how many bytes each rank sends for each one that it gives."""
    return 2 * (ranks - 1) / ranks


FULL: Final = 4.0
"""Bytes of an element that is not compressed."""


@dataclass(frozen=True)
class CollectiveSample:
    """A step that was measured with and without compression.

    Attributes:
        elements: of all gradients.
        element_bytes: bytes that an element takes when compressed, scaling factors included.
        without, seconds: of the step without and with compression.
    """

    elements: float
    element_bytes: float
    without: float
    seconds: float


@dataclass(frozen=True)
class Exchange:
    """A way to exchange gradients, at a number of devices.

    Attributes:
        travel: seconds a byte.
        coding: seconds an element; below zero where full gradients take another, slower way, as those of the study do with MPI, where
            compressed ones are sent from two buffers in turns.
    """

    travel: float
    coding: float

    def seconds(self, elements: float, element_bytes: float, without: float) -> float:
        """Returns the seconds of a step with compressed gradients, of one that takes `without` seconds without."""
        return without - self.travel * elements * (FULL - element_bytes) + self.coding * elements

    @classmethod
    def fit(cls, samples: Sequence[CollectiveSample]) -> Exchange:
        """Returns the numbers that fit samples of several networks or widths best; raises `ProfileError` where there are too few."""
        elements = np.array([item.elements for item in samples])
        saved = elements * (FULL - np.array([item.element_bytes for item in samples]))
        weights = 1 / np.array([item.seconds for item in samples])
        unknowns = np.stack([-saved, elements], axis=-1) * weights[:, None]
        gained = np.array([item.seconds - item.without for item in samples]) * weights
        scale = np.abs(unknowns).max(axis=0, initial=0.0)
        if len(samples) < 2 or np.linalg.matrix_rank(unknowns / np.where(scale > 0, scale, 1)) < 2:
            do = "give steps with gradients of several widths"
            raise ProfileError(
                f"{len(samples)} samples do not tell travelling from coding", where="samples", do=do
            )
        travel, coding = _least_deviations(unknowns / scale, gained) / scale
        return cls(float(travel), float(coding))


EXCHANGES: Final[Mapping[tuple[str, int], Exchange]] = MappingProxyType(
    {
        ("mpi", 2): Exchange(7.05e-10, -1.892e-09),
        ("mpi", 4): Exchange(8.164e-10, -2.841e-09),
        ("mpi", 8): Exchange(2.673e-09, -1.353e-09),
        ("mpi", 16): Exchange(4.457e-09, -2.785e-10),
        ("nccl", 2): Exchange(2.053e-10, 4.395e-10),
        ("nccl", 4): Exchange(1.812e-10, 2.881e-10),
        ("nccl", 8): Exchange(2.287e-10, 3.968e-10),
    }
)
"""By primitive and number of GPUs, fitted to all networks of the study."""

_TURNS: Final = 200
_SMALLEST: Final = 1e-6


def _least_deviations(unknowns: Array, wanted: Array) -> Array:
    """Returns the least sum of absolute deviations, by least squares that trust what is far off less each time."""
    result: Array = np.linalg.lstsq(unknowns, wanted, rcond=None)[0]
    for _ in range(_TURNS):
        trust = 1 / np.sqrt(np.abs(wanted - unknowns @ result) + _SMALLEST)
        result = np.linalg.lstsq(unknowns * trust[:, None], wanted * trust, rcond=None)[0]
    return result
