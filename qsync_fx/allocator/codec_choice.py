"""Codecs of gradients as a choice beside formats: one for each bucket, the same on all ranks.

Invariant: what a choice costs is what `replay` and `compress` make of it. Where every bucket is in FP32, DistributedDataParallel sends them
itself; under any other choice all of them go through our exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qsync_fx.communication.codec_cost_model import Rates, coded, small
from qsync_fx.communication.codecs import PLAIN
from qsync_fx.errors import ProfileError, nearest, shown
from qsync_fx.predictor.replayer.cluster import Cluster
from qsync_fx.predictor.replayer.cluster_step import (
    CompressedTransfer,
    SimulatedBucket,
    beside_computing,
    travel,
)
from qsync_fx.predictor.times import Parameter

if TYPE_CHECKING:
    from qsync_fx.allocator.problem import Problem

Codecs = tuple[str, ...]
"""The codec of each bucket; () where there is nothing to choose."""


@dataclass(frozen=True)
class CodecSearchSpace:
    """What codecs there are to choose from.

    Attributes:
        codecs: by name, FP32 first.
        rates: how fast the slowest devices code.
    """

    codecs: tuple[str, ...]
    rates: Rates


@dataclass(frozen=True)
class CodecOptions:
    """What each choice makes of each bucket.

    Attributes:
        alone, alone_beside: seconds of each bucket as DistributedDataParallel sends it, and those that devices compute later for it.
        coded, seconds, beside, variance: by bucket and codec, what travels, the same two of it, and what it adds to the variance of the
            mean gradient; empty where there is nothing to choose.
        parameters: those of each bucket, and which of them are coded.
    """

    alone: tuple[float, ...]
    alone_beside: tuple[float, ...]
    coded: tuple[Mapping[str, CompressedTransfer], ...] = ()
    seconds: tuple[Mapping[str, float], ...] = ()
    beside: tuple[Mapping[str, float], ...] = ()
    variance: tuple[Mapping[str, float], ...] = ()
    parameters: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return bool(self.coded)

    @property
    def plain(self) -> Codecs:
        """The choice that compresses nothing."""
        return (PLAIN.name,) * len(self.coded)

    def travel(self, codecs: Codecs) -> list[float]:
        """Returns the seconds of each bucket under a choice."""
        return self._under(codecs, self.alone, self.seconds)

    def computed_later(self, codecs: Codecs) -> list[float]:
        """Returns the seconds that devices compute later for each bucket under a choice."""
        return self._under(codecs, self.alone_beside, self.beside)

    def added(self, codecs: Codecs) -> float:
        """Returns what a choice adds to the variance of the mean gradient."""
        return sum(by[codec] for by, codec in zip(self.variance, codecs, strict=True))

    def compression(self, codecs: Codecs) -> list[CompressedTransfer] | None:
        """Returns a choice as the replayer takes it."""
        if codecs == self.plain:
            return None
        return [by[codec] for by, codec in zip(self.coded, codecs, strict=True)]

    def _under(
        self, codecs: Codecs, alone: Sequence[float], coded: Sequence[Mapping[str, float]]
    ) -> list[float]:
        """Returns what each bucket has under a choice, of what it has alone and in each codec."""
        if codecs == self.plain:
            return list(alone)
        return [by[codec] for by, codec in zip(coded, codecs, strict=True)]

    def by_parameter(self, codecs: Codecs) -> dict[str, str]:
        """Returns a choice as plans hold it: the codec of each parameter that is coded."""
        return {
            path: codec
            for paths, codec in zip(self.parameters, codecs, strict=True)
            for path in paths
            if codec != PLAIN.name
        }


def options_of(
    problem: Problem, parameters: Sequence[Parameter], buckets: Sequence[SimulatedBucket]
) -> CodecOptions:
    """Returns what there is to choose for these buckets.

    Raises:
        ProfileError: what a codec adds is not known, how fast it codes is not, or it codes by shapes.
    """
    cluster, coding = problem.cluster, problem.coding
    alone, alone_beside = _taken(cluster, buckets)
    if coding is None or not buckets:
        return CodecOptions(alone, alone_beside)
    available = {parameter.path: parameter for parameter in parameters}
    left = small(parameters)
    tables: list[dict[str, CompressedTransfer]] = []
    seconds: list[dict[str, float]] = []
    neighbours: list[dict[str, float]] = []
    variance: list[dict[str, float]] = []
    inside: list[tuple[str, ...]] = []
    for bucket in buckets:
        owned = [available[path] for path in bucket.parameters]
        large = tuple(path for path in bucket.parameters if path not in left)
        inside.append(large)
        table = {
            codec: coded(
                owned,
                dict.fromkeys(large, codec),
                cluster.ranks,
                coding.rates,
                codec,
                cluster.nodes.ranks,
            )
            for codec in coding.codecs
        }
        tables.append(table)
        sent = [
            SimulatedBucket(bucket.parameters, bucket.nbytes, item.nbytes, item)
            for item in table.values()
        ]
        for into, result in zip((seconds, neighbours), _taken(cluster, sent), strict=True):
            into.append(dict(zip(table, result, strict=True)))
        variance.append({codec: _variance(problem, large, codec) for codec in coding.codecs})
    return CodecOptions(
        alone,
        alone_beside,
        tuple(tables),
        tuple(seconds),
        tuple(neighbours),
        tuple(variance),
        parameters=tuple(inside),
    )


def _taken(
    cluster: Cluster, buckets: Sequence[SimulatedBucket]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the seconds that buckets take to be sent, and those that devices compute later for them."""
    seconds = travel(cluster, buckets)
    return tuple(seconds.tolist()), tuple(beside_computing(cluster, buckets, seconds))


def _variance(problem: Problem, paths: Sequence[str], codec: str) -> float:
    """Returns what a codec adds to the variance of the mean gradient.

    Each rank codes its gradient, and these errors are independent: over all ranks their mean has that of one over the number of ranks. Of
    more than two ranks the mean is coded again, for which the gradient of a rank stands in: it is no larger, as a rule. Where ranks share
    nodes, it is nodes that code their means, for which it stands in, too.
    """
    if codec == PLAIN.name:
        return 0.0
    ranks, mean = problem.cluster.ranks, 0.0
    for name, part in problem.classes.items():
        share = problem.cluster.devices[name].count / ranks
        mean += share * sum(_known(part.sensitivity.gradients, path, codec) for path in paths)
    nodes = ranks // problem.cluster.nodes.ranks
    return mean * (1 / nodes + (nodes > 2))


def _known(gradients: Mapping[str, Mapping[str, float]], path: str, codec: str) -> float:
    by = gradients.get(path)
    if by is None:
        raise ProfileError(
            f"nothing says what codecs add to the gradient of {shown(path)}",
            where="the sensitivity",
            do="find it anew, with qsync_fx.sensitivity or qsync_fx.measure, which look at gradients, too",
        )
    if codec not in by:
        raise ProfileError(
            f"what {shown(codec)} adds to gradients is not known",
            where="the sensitivity",
            do=nearest(codec, by),
        )
    return by[codec]
