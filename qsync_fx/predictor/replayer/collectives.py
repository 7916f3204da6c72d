"""Duration of all-reduces, and of training steps with compressed gradients.

`CollectiveLink` models a ring by bandwidth and latency, `Levels` a hierarchical all-reduce, and
`MeasuredCollectives` interpolates measurements. Duration never decreases with the number of bytes,
and 0 bytes need 0 seconds. `Exchange` predicts the effect of compression on a measured step.
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
"""Phases of an all-reduce: reduce-scatter and all-gather."""


class AllReduce(Protocol):
    """Duration of an all-reduce."""

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        """Return the seconds for each number of bytes that every rank contributes.

        Args:
            nbytes: bytes per rank, one or several numbers.
            ranks: number of ranks.
            phases: phases of the exchange, at most 2.
        """


@dataclass(frozen=True)
class CollectiveLink:
    """Ring all-reduce: each rank sends and receives 2 (ranks - 1) / ranks of the bytes.

    Attributes:
        bandwidth: bytes per second in one direction of the slowest link.
        latency: seconds of the smallest all-reduce, in equal parts for each phase.
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
    """Measured all-reduces, interpolated linearly in logarithmic coordinates.

    Below the smallest measurement the time is constant (latency). Above the largest one it is
    proportional to the bytes. The latency per phase is unknown, so one phase has the time of two.

    Attributes:
        table: pairs of bytes and seconds.
        ranks: number of ranks in the measurement.
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
    """Hierarchical all-reduce over M nodes of s ranks.

    The ranks of a node reduce-scatter, equal shards of all nodes are averaged across nodes, and the
    ranks of a node all-gather. For P bytes per rank

        seconds = latency inside + 2 (s - 1)/s P/inside + latency across + 2 (M - 1)/M P/across

    as each rank of a node averages P/s bytes, and all of them share one link. Sources: H. Mikami et
    al., "Massively Distributed SGD", 2018; M. Cho et al., "BlueConnect: Decomposing All-Reduce for
    Deep Learning on Heterogeneous Network Hierarchy", MLSys 2019.

    Attributes:
        across: all-reduce between nodes, over the link that the ranks of a node share.
        inside: all-reduce between the ranks of a node.
        size: ranks per node.
    """

    across: AllReduce
    inside: AllReduce
    size: int

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        """Return the seconds for these bytes per rank; `phases` applies between nodes only."""
        within = self.inside.seconds(nbytes, self.size)
        result: Array = within + self.across.seconds(nbytes, ranks // self.size, phases)
        return result


def share(ranks: int) -> float:
    """Return the bytes that each rank sends per byte that it contributes to a ring all-reduce."""
    return 2 * (ranks - 1) / ranks


FULL: Final = 4.0
"""Bytes of an uncompressed element."""


@dataclass(frozen=True)
class CollectiveSample:
    """Step measured with and without compression.

    Attributes:
        elements: number of elements of all gradients.
        element_bytes: bytes of a compressed element, including scales.
        without, seconds: duration of the step without and with compression.
    """

    elements: float
    element_bytes: float
    without: float
    seconds: float


@dataclass(frozen=True)
class Exchange:
    """Cost model of a gradient exchange for a number of devices.

        seconds = without - travel * (full bytes - bytes) + coding * elements

    Two coefficients describe an exchange: the exposed transfer time of a byte, which overlap with
    computation does not hide, and the additional time of an element for compression, independent
    of its width. The uncompressed step supplies all other times.

    Attributes:
        travel: seconds per byte.
        coding: seconds per element. It is negative if full-precision gradients use a slower path,
            as in the MPI results of the study, which send compressed gradients double-buffered.
    """

    travel: float
    coding: float

    def seconds(self, elements: float, element_bytes: float, without: float) -> float:
        """Return the duration of a step with compression, given its duration `without`."""
        return without - self.travel * elements * (FULL - element_bytes) + self.coding * elements

    @classmethod
    def fit(cls, samples: Sequence[CollectiveSample]) -> Exchange:
        """Return the least-absolute-deviations fit to samples of several networks or widths.

        It minimises the mean relative error, so a misprint in a table has little influence.

        Raises:
            ProfileError: the samples do not determine both coefficients.
        """
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
"""Coefficients by primitive and number of GPUs, fitted to all networks of the study.

The study is D. Grubic et al., "Synchronous Multi-GPU Deep Learning with Low-Precision
Communication: An Experimental Study", EDBT 2018: K80 GPUs of Amazon EC2 (p2), Fig. 10 and 11, QSGD
rows. `communication_study.py` in benchmarks/published fits them and reports the error for other
networks."""

_TURNS: Final = 200
_SMALLEST: Final = 1e-6


def _least_deviations(unknowns: Array, wanted: Array) -> Array:
    """Return the least-absolute-deviations solution by iteratively reweighted least squares."""
    result: Array = np.linalg.lstsq(unknowns, wanted, rcond=None)[0]
    for _ in range(_TURNS):
        trust = 1 / np.sqrt(np.abs(wanted - unknowns @ result) + _SMALLEST)
        result = np.linalg.lstsq(unknowns * trust[:, None], wanted * trust, rcond=None)[0]
    return result
