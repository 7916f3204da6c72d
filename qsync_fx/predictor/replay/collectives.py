"""How long an all-reduce takes: by bandwidth and latency of the slowest link, in two levels, or by a table that was measured.

Invariant: more bytes take no less time, whatever the table says between its points, and no bytes take none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from qsync_fx.predictor.replay.closed_form import Array

_PHASES: Final = 2
"""Of an all-reduce: parts are summed, and the sums are sent to all."""


class AllReduce(Protocol):
    """How long an all-reduce takes."""

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        """Returns the seconds for each number of bytes that every one of the ranks gives, where that takes two phases, or fewer."""


@dataclass(frozen=True)
class Link:
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
        taken: Array = np.where(sizes > 0, latency + share(ranks) * sizes / self.bandwidth, 0.0)
        return taken if ranks > 1 else np.zeros_like(sizes)


@dataclass(frozen=True)
class Measured:
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
        taken = np.exp(np.interp(np.log(within), np.log(points[:, 0]), np.log(points[:, 1])))
        beyond = np.maximum(sizes / points[-1, 0], 1)
        scaled: Array = np.where(sizes > 0, taken * beyond * share(ranks) / share(self.ranks), 0.0)
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
        found: Array = within + self.across.seconds(nbytes, ranks // self.size, phases)
        return found


def share(ranks: int) -> float:
    """Returns how many bytes each rank sends for each one that it gives."""
    return 2 * (ranks - 1) / ranks
