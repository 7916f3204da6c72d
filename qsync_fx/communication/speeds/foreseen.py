"""What a bucket of gradients will cost in a codec: bytes on the wire, and seconds of coding.

Invariant: bytes are those that `reduction` and `hierarchy` send, headers included, on average over the ranks; seconds are of as many
values as they encode and decode. Both follow from sizes of parameters: nothing is coded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from qsync_fx.communication.bucket import gathered
from qsync_fx.communication.codecs import PLAIN, Codec, codec_named
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.geometry import threshold
from qsync_fx.communication.speeds.rates import Rates
from qsync_fx.communication.wire.messages import HEADER
from qsync_fx.communication.wire.stretches import VALUES
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.fleet import Coded, buckets_of
from qsync_fx.predictor.schedule import Schedule

_WIDE = 4


class Sized(Protocol):
    """A parameter, as schedules have it."""

    @property
    def path(self) -> str: ...
    @property
    def numel(self) -> int: ...


def coded(
    parameters: Sequence[Sized], codecs: Mapping[str, str], ranks: int, rates: Rates, name: str = "", size: int = 1
) -> Coded:
    """Returns what a bucket of these parameters costs; those without a codec go in FP32.

    Args:
        name: of the bucket's codec, where it is not to be that of most values.
        size: ranks of a node, inside of which all go in FP32; 1 for a codec between all ranks.

    Raises:
        ProfileError: a codec depends on shapes, which profiles do not hold, or its rate is not known.
    """
    made = [_of_size(codec_named(codecs.get(parameter.path, PLAIN.name)), parameter) for parameter in parameters]
    # Between nodes each rank averages a part of all values.
    nodes = ranks // size
    ways = gathered(made, nodes)
    values: dict[str, int] = {}
    sent = seconds = 0.0
    for parameter, codec, whole in zip(parameters, made, ways, strict=True):
        encoded, decoded = volumes(nodes, whole)
        rate, nbytes = rates.of(codec.name), _WIDE * parameter.numel
        sent += _given(codec.nbytes(parameter.numel), nodes, whole)
        seconds += nbytes / size * (encoded / rate.encode + decoded / rate.decode)
        values[codec.name] = values.get(codec.name, 0) + parameter.numel
    # Of each rank of a node, a message to every other node in each phase.
    heads = size * sum(_given(HEADER, nodes, True) if whole else HEADER * nodes for whole in set(ways))
    phases = sum(1 if whole else 2 for whole in set(ways))
    inside = inside_seconds = 0.0
    if size > 1:
        rate, nbytes = rates.of(PLAIN.name), _WIDE * sum(values.values())
        # A rank writes all of its gradients and its part's mean, and reads its part of all ranks and the means of the others.
        inside_seconds = nbytes * ((1 + 1 / size) / rate.encode + (2 - 1 / size) / rate.decode)
        inside = float(nbytes + HEADER * size)
    named = name or max(values, key=values.__getitem__, default=PLAIN.name)
    # Of what a rank averages: its part of the node's, and, where it is sent its own alone, of that the part of each.
    cuts = math.ceil(sum(values.values()) / size / (1 if all(ways) else nodes) / VALUES)
    return Coded(named, sent + heads, seconds, phases, inside, max(cuts, 1), inside_seconds)


def by_bucket(
    schedules: Mapping[str, Schedule], fleet: Cluster, codecs: Mapping[str, str], rates: Rates
) -> list[Coded] | None:
    """Returns what is done to each bucket of a fleet where parameters have codecs; None where nothing is compressed."""
    if all(codec == PLAIN.name for codec in codecs.values()):
        return None
    parameters = next(iter(schedules.values())).parameters
    buckets = [[parameters[at] for at in which] for which in buckets_of(schedules, fleet)]
    return [coded(bucket, codecs, fleet.ranks, rates, size=fleet.nodes.ranks) for bucket in buckets]


def volumes(ranks: int, whole: bool) -> tuple[float, float]:
    """Returns how many times a rank encodes, and decodes, as many values as there are; `whole` is where all ranks are sent all of them."""
    if ranks == 1:
        return 0.0, 0.0
    # Else each decodes its part of all, codes the mean of that part, and decodes all means.
    return (1.0, float(ranks)) if whole else (1 + 1 / ranks, 2.0)


def _given(nbytes: float, ranks: int, whole: bool) -> float:
    """Returns the bytes of which an all-reduce sends as many as an exchange of `nbytes` does."""
    return nbytes * ranks / 2 if whole else nbytes


def small(parameters: Sequence[Sized]) -> set[str]:
    """Returns the parameters that go in FP32 whatever the codec, as `compress` leaves them out."""
    least = threshold([parameter.numel for parameter in parameters])
    return {parameter.path for parameter in parameters if parameter.numel < least}


def uniform(parameters: Sequence[Sized], codec: str) -> dict[str, str]:
    """Returns a codec for all parameters but small ones."""
    out = small(parameters)
    return {parameter.path: codec for parameter in parameters if parameter.path not in out}


def _of_size(codec: Codec, parameter: Sized) -> Codec:
    if isinstance(codec, Adaptive):
        raise ProfileError(
            f"how many bits {codec.name} sends follows from the link, while it trains",
            where=parameter.path,
            do="foresee one of its levels",
        )
    fitted = codec.fitted((parameter.numel,))
    if fitted != codec:
        raise ProfileError(
            f"{codec.name} codes by the shapes of parameters, which a profile does not hold",
            where=parameter.path,
            do="choose another codec, such as 1bit*, which has the same rule over consecutive values",
        )
    return codec
