"""Gradient buckets of DistributedDataParallel, and the duration of all-reduces.

`ddp_buckets` returns the lists of torch's `Reducer`, which rebuilds buckets after the first
iteration in the order in which gradients became ready. `CollectiveLink` models a ring, `Levels` a
hierarchical all-reduce, and `MeasuredCollectives` interpolates measurements.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
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
        if ranks < 2:
            return np.zeros_like(sizes)
        used: Array = np.where(sizes > 0, latency + share(ranks) * sizes / self.bandwidth, 0.0)
        return used


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


FIRST_BYTES: Final = 2**20
"""Limit of the first bucket: torch.distributed._DEFAULT_FIRST_BUCKET_BYTES."""
BUCKET_BYTES: Final = 25 * 2**20
"""Limit of all other buckets: the default `bucket_cap_mb` of DistributedDataParallel."""


@dataclass
class _Filling:
    """Bucket of one type that is not yet full."""

    indices: list[int] = field(default_factory=list)
    size: int = 0
    done: int = 0


def ddp_buckets(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int] = 4,
    *,
    arrival: Sequence[int] | None = None,
    limits: Sequence[int] = (FIRST_BYTES, BUCKET_BYTES),
    types: Sequence[Hashable] | None = None,
    sparse: Collection[int] = (),
) -> list[list[int]]:
    """Return the parameters of each bucket from the second iteration on, in sending order.

    Args:
        numels: number of elements of each parameter, in registration order.
        dtype_bytes: bytes per element, for all parameters or for each.
        arrival: parameters in the order in which their gradients become ready; by default the
            reverse registration order. A parameter that is missing here receives no gradient.
        limits: size in bytes at which the first bucket is full, the second, and so on; the last
            limit applies to all further buckets. With `bucket_cap_mb` it is one limit for all.
        types: keys that separate gradients, such as dtype and device; default: bytes per element.
        sparse: parameters with sparse gradients, each in a bucket of its own.

    Raises:
        ProfileError: a size is negative, lists differ in length, or a parameter does not exist or
            arrives twice.
    """
    sizes, kinds = _checked(numels, dtype_bytes, types, limits)
    order: Sequence[int] = range(len(sizes))[::-1]
    if arrival is not None:
        order = arrival
    do = f"name each of the {len(sizes)} parameters at most once"
    if unknown := [index for index in (*order, *sparse) if index not in range(len(sizes))]:
        raise ProfileError(f"there is no parameter {unknown[0]}", where="arrival", do=do)
    if len(set(order)) != len(order):
        raise ProfileError("a gradient arrives twice", where="arrival", do=do)
    filling: dict[Hashable, _Filling] = {}
    full: list[list[int]] = []
    for index in order:
        if index in sparse:
            full.append([index])
            continue
        bucket = filling.setdefault(kinds[index], _Filling())
        bucket.indices.append(index)
        bucket.size += sizes[index]
        if bucket.size >= limits[min(bucket.done, len(limits) - 1)]:
            full.append(bucket.indices)
            filling[kinds[index]] = _Filling(done=bucket.done + 1)
    # torch stores them in a hash table. With few types its order starts with the last type.
    return full + [bucket.indices for bucket in reversed(filling.values()) if bucket.indices]


def _checked(
    numels: Sequence[int],
    dtype_bytes: int | Sequence[int],
    types: Sequence[Hashable] | None,
    limits: Sequence[int],
) -> tuple[list[int], Sequence[Hashable]]:
    """Return bytes and type of each parameter."""
    if isinstance(dtype_bytes, int):
        dtype_bytes = [dtype_bytes] * len(numels)
    widths = list(dtype_bytes)
    kinds: Sequence[Hashable] = widths
    if types is not None:
        kinds = types
    for name, values in (("dtype_bytes", widths), ("types", kinds)):
        if len(values) != len(numels):
            message = f"{len(values)} {name} for {len(numels)} parameters"
            raise ProfileError(message, where=name, do="give one for each parameter")
    for name, least, values in (
        ("numels", 0, numels),
        ("dtype_bytes", 1, widths),
        ("limits", 1, limits),
    ):
        if (wrong := next((value for value in values if value < least), None)) is not None:
            raise ProfileError(
                f"{wrong} is less than {least}", where=name, do="give sizes as whole numbers"
            )
    if not limits:
        raise ProfileError(
            "there is no limit", where="limits", do="give the bytes at which a bucket is full"
        )
    return [numel * width for numel, width in zip(numels, widths, strict=True)], kinds
