"""Codec choice for gradient buckets: options per bucket, equal on all ranks.

If all buckets are in FP32, DistributedDataParallel sends them; otherwise all buckets go through the
all-reduce of qsync_fx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qsync_fx.communication.codec_cost_model import Rates, coded, small
from qsync_fx.communication.codecs import PLAIN
from qsync_fx.errors import ProfileError, nearest, shown
from qsync_fx.plan.cluster_plan import levels_of
from qsync_fx.predictor.cost_mapper.times import Parameter
from qsync_fx.predictor.replayer.cluster import Cluster
from qsync_fx.predictor.replayer.cluster_step import (
    CompressedTransfer,
    SimulatedBucket,
    beside_computing,
    travel,
)

if TYPE_CHECKING:
    from qsync_fx.allocator.problem import Problem

Codecs = tuple[str, ...]
"""Codec of each bucket; () if there is no choice."""


@dataclass(frozen=True)
class CodecSearchSpace:
    """Available codecs, FP32 first, with encode and decode rates of the slowest devices.

    With nodes, "qsgd4/qsgd8" is the choice of a codec between nodes and another inside them.
    """

    codecs: tuple[str, ...]
    rates: Rates


@dataclass(frozen=True)
class CodecOptions:
    """Seconds, delays of computation and variance of each codec for each bucket.

    `alone` and `alone_delays` belong to buckets that DistributedDataParallel sends in FP32. The
    tables by bucket and codec are empty if there is no choice. Small parameters are not coded.
    """

    alone: tuple[float, ...]
    alone_delays: tuple[float, ...]
    coded: tuple[Mapping[str, CompressedTransfer], ...] = ()
    seconds: tuple[Mapping[str, float], ...] = ()
    delays: tuple[Mapping[str, float], ...] = ()
    variance: tuple[Mapping[str, float], ...] = ()
    parameters: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    @property
    def open(self) -> bool:
        """Whether there is a choice."""
        return bool(self.coded)

    @property
    def plain(self) -> Codecs:
        """Choice of FP32 for all buckets."""
        return (PLAIN.name,) * len(self.coded)

    def travel(self, codecs: Codecs) -> list[float]:
        """Return the transfer time of each bucket in seconds."""
        return self._under(codecs, self.alone, self.seconds)

    def computed_later(self, codecs: Codecs) -> list[float]:
        """Return the seconds by which each bucket delays computation."""
        return self._under(codecs, self.alone_delays, self.delays)

    def added(self, codecs: Codecs) -> float:
        """Return the variance that a choice adds to the mean gradient."""
        return sum(by[codec] for by, codec in zip(self.variance, codecs, strict=True))

    def compression(self, codecs: Codecs) -> list[CompressedTransfer] | None:
        """Return the transfers for the replayer; None for FP32 in all buckets."""
        if codecs == self.plain:
            return None
        return [by[codec] for by, codec in zip(self.coded, codecs, strict=True)]

    def _under(
        self, codecs: Codecs, alone: Sequence[float], coded: Sequence[Mapping[str, float]]
    ) -> list[float]:
        """Return the value of each bucket: `alone` for FP32 everywhere, else by codec."""
        if codecs == self.plain:
            return list(alone)
        return [by[codec] for by, codec in zip(coded, codecs, strict=True)]

    def by_parameter(self, codecs: Codecs) -> dict[str, str]:
        """Return the codec of each coded parameter, the form used by plans."""
        return {
            path: codec
            for paths, codec in zip(self.parameters, codecs, strict=True)
            for path in paths
            if codec != PLAIN.name
        }


def options_of(
    problem: Problem, parameters: Sequence[Parameter], buckets: Sequence[SimulatedBucket]
) -> CodecOptions:
    """Return the cost of each codec for each bucket; raise `ProfileError` if it is unknown."""
    cluster, coding = problem.cluster, problem.coding
    alone, alone_delays = _transfer_times(cluster, buckets)
    if coding is None or not buckets:
        return CodecOptions(alone, alone_delays)
    by_path = {parameter.path: parameter for parameter in parameters}
    left = small(parameters)
    tables: list[dict[str, CompressedTransfer]] = []
    seconds: list[dict[str, float]] = []
    delays: list[dict[str, float]] = []
    variance: list[dict[str, float]] = []
    inside: list[tuple[str, ...]] = []
    for bucket in buckets:
        owned = [by_path[path] for path in bucket.parameters]
        large = tuple(path for path in bucket.parameters if path not in left)
        table = {}
        for codec in coding.codecs:
            codecs, size = dict.fromkeys(large, codec), cluster.ranks_per_node
            table[codec] = coded(owned, codecs, cluster.ranks, coding.rates, codec, size)
        sent = [
            SimulatedBucket(bucket.parameters, bucket.nbytes, item.nbytes, item)
            for item in table.values()
        ]
        transfer, delayed = _transfer_times(cluster, sent)
        seconds.append(dict(zip(table, transfer, strict=True)))
        delays.append(dict(zip(table, delayed, strict=True)))
        variance.append({codec: _variance(problem, large, codec) for codec in coding.codecs})
        tables.append(table)
        inside.append(large)
    return CodecOptions(
        alone,
        alone_delays,
        tuple(tables),
        tuple(seconds),
        tuple(delays),
        tuple(variance),
        tuple(inside),
    )


def _transfer_times(
    cluster: Cluster, buckets: Sequence[SimulatedBucket]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return per bucket the transfer seconds and the seconds by which it delays computation."""
    seconds = travel(cluster, buckets)
    return tuple(seconds.tolist()), tuple(beside_computing(cluster, buckets, seconds))


def _variance(problem: Problem, paths: Sequence[str], codec: str) -> float:
    """Return the variance that a codec adds to the mean gradient.

    Coding errors of the ranks are independent, so their mean has the variance of one error divided
    by the number of ranks. With more than two ranks the mean is coded again; the gradient of a rank
    approximates it, as the mean is usually no larger. If ranks share nodes, the nodes code their
    means; the same approximation applies. A codec inside nodes adds one error per rank, divided by
    the number of ranks, and the error of the mean, which is equal on all nodes.
    """
    cluster, (between, inside) = problem.cluster, levels_of(codec)
    nodes = cluster.nodes
    result = _of_gradient(problem, paths, between) * (1 / nodes + (nodes > 2))
    return result + _of_gradient(problem, paths, inside) * (1 / cluster.ranks + 1)


def _of_gradient(problem: Problem, paths: Sequence[str], codec: str) -> float:
    """Return the variance of coding the gradient of a rank once, as the mean over ranks.

    Ranks send gradients in proportion to their samples, so their mean square is weighted.
    """
    if codec == PLAIN.name:
        return 0.0
    mean = 0.0
    for name, part in problem.classes.items():
        share = problem.weight(name) * problem.cluster.ranks
        mean += share * sum(
            _codec_variance(part.sensitivity.gradients, path, codec) for path in paths
        )
    return mean


def _codec_variance(gradients: Mapping[str, Mapping[str, float]], path: str, codec: str) -> float:
    by = gradients.get(path)
    if by is None:
        message = f"the variance of codecs for the gradient of {shown(path)} is unknown"
        do = "measure it again, with qsync_fx.sensitivity or qsync_fx.measure"
        raise ProfileError(message, where="the sensitivity", do=do)
    if codec not in by:
        message = f"the variance that {shown(codec)} adds to gradients is unknown"
        raise ProfileError(message, where="the sensitivity", do=nearest(codec, by))
    return by[codec]
