"""Gradient buckets of DistributedDataParallel, and the duration of all-reduces.

`ddp_buckets` returns the lists of torch's `Reducer`, which rebuilds buckets after the first
iteration in the order in which gradients became ready. `CollectiveLink` models a ring, `Levels` a
hierarchical all-reduce. `MeasuredCollectives` and `MeasuredExchange` interpolate measurements of
all-reduces and of exchanges of compressed gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from qsync_fx.devices.roofline import interpolated, share
from qsync_fx.predictor.replayer.device_timeline import Array

_PHASES: Final = 2
"""Phases of an all-reduce: reduce-scatter and all-gather."""


class AllReduce(Protocol):
    """Duration of an all-reduce."""

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        """Return the seconds for each number of bytes that every rank contributes."""


@dataclass(frozen=True)
class CollectiveLink:
    """Ring all-reduce: each rank sends and receives 2 (ranks - 1) / ranks of the bytes.

    The bandwidth is in bytes per second in one direction of the slowest link. The latency, in
    seconds of the smallest all-reduce, has equal parts for each phase.
    """

    bandwidth: float
    latency: float = 0.0

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        sizes = np.asarray(nbytes, dtype=float)
        if ranks < 2:
            return np.zeros_like(sizes)
        latency = self.latency * phases / _PHASES
        return np.where(sizes > 0, latency + share(ranks) * sizes / self.bandwidth, 0.0)


@dataclass(frozen=True)
class MeasuredCollectives:
    """Measured all-reduces, interpolated linearly in logarithmic coordinates.

    `table` has pairs of bytes and seconds for `ranks` ranks. The latency per phase is unknown, so
    one phase has the time of two.
    """

    table: Sequence[tuple[float, float]]
    ranks: int

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        sizes = np.asarray(nbytes, dtype=float)
        if ranks < 2:
            return np.zeros_like(sizes)
        measured, seconds = np.array(sorted(self.table), dtype=float).T
        used = interpolated(measured, np.maximum.accumulate(seconds), sizes)
        return np.where(sizes > 0, used * share(ranks) / share(self.ranks), 0.0)


@dataclass(frozen=True)
class MeasuredExchange:
    """Measured phases of an exchange of compressed gradients, with logarithmic axes.

    In a phase, each rank of a group sends a message to each other rank of its group. An all-reduce
    of compressed gradients is a reduce-scatter followed by an all-gather, a phase each, or a single
    all-gather.

    Attributes:
        table: pairs of the bytes that a rank sends in a phase, to all others together, and the
            seconds of the phase.
        groups: number of groups that exchange at once and share the bytes of the all-reduce, such
            as one group for each rank of a node.
    """

    table: Sequence[tuple[float, float]]
    groups: int = 1

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        sizes = np.asarray(nbytes, dtype=float)
        if ranks < 2:
            return np.zeros_like(sizes)
        measured, seconds = np.array(sorted(self.table), dtype=float).T
        sent = share(ranks) * sizes / (phases * self.groups)
        used = phases * interpolated(measured, np.maximum.accumulate(seconds), sent)
        return np.where(sizes > 0, used, 0.0)


@dataclass(frozen=True)
class InnerLinks:
    """Collectives among the `ranks` ranks of a node."""

    ranks: int
    links: AllReduce


@dataclass(frozen=True)
class Levels:
    """Hierarchical all-reduce over nodes (docs/replayer.md has the formula).

    The ranks of a node reduce-scatter, equal shards of all nodes are averaged across nodes, and the
    ranks of a node all-gather. All nodes wait for the slowest class of nodes. Sources: H. Mikami et
    al., "Massively Distributed SGD", 2018; M. Cho et al., "BlueConnect", MLSys 2019.

    Attributes:
        across: collectives between nodes, by the total bytes of a node.
        inside: collectives within the nodes of each class; none if each rank is a node.
        nodes: number of nodes.
    """

    across: AllReduce
    inside: tuple[InnerLinks, ...]
    nodes: int

    def seconds(self, nbytes: Sequence[float] | Array, ranks: int, phases: int = _PHASES) -> Array:
        """Return the seconds for these bytes per rank, of all nodes together.

        `phases` applies between nodes only, and `nodes` replaces `ranks`.
        """
        return self.inside_seconds(nbytes) + self.across.seconds(nbytes, self.nodes, phases)

    def inside_seconds(self, nbytes: Sequence[float] | Array) -> Array:
        """Return the seconds of both phases within the slowest nodes, for these bytes per rank."""
        slowest = np.zeros(len(nbytes))
        for node in self.inside:
            slowest = np.maximum(slowest, node.links.seconds(nbytes, node.ranks))
        return slowest


FIRST_BYTES: Final = 2**20
"""Limit of the first bucket: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""
BUCKET_BYTES: Final = 25 * 2**20
"""Limit of all other buckets: the default `bucket_cap_mb` of DistributedDataParallel."""


def ddp_buckets(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int] = 4,
    *,
    arrival: Sequence[int] | None = None,
    limits: Sequence[int] = (FIRST_BYTES, BUCKET_BYTES),
) -> list[list[int]]:
    """Return the parameters of each bucket from the second iteration on, in sending order.

    Args:
        numels: number of elements of each parameter, in registration order.
        dtype_bytes: bytes per element, for all parameters or for each. Parameters of different
            widths are in different buckets.
        arrival: parameters in the order in which their gradients become ready; by default the
            reverse registration order. A parameter that is missing here receives no gradient.
        limits: size in bytes at which the first bucket is full, the second, and so on; the last
            limit applies to all further buckets. With `bucket_cap_mb` it is one limit for all.
    """
    count = len(numels)
    widths = [dtype_bytes] * count if isinstance(dtype_bytes, int) else list(dtype_bytes)
    order = list(range(count)[::-1] if arrival is None else arrival)
    filling: dict[int, list[int]] = {}
    sizes, done = Counter[int](), Counter[int]()
    full: list[list[int]] = []
    for index in order:
        width = widths[index]
        filling.setdefault(width, []).append(index)
        sizes[width] += numels[index] * width
        if sizes[width] >= limits[min(done[width], len(limits) - 1)]:
            full.append(filling[width])
            filling[width], sizes[width] = [], 0
            done[width] += 1
    # torch stores them in a hash table. With few types its order starts with the last type.
    return full + [indices for indices in reversed(filling.values()) if indices]
