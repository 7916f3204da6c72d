"""Which codec pays: a step with gradients in each, at a bandwidth, and from which bandwidth on it takes longer than without.

A step is replayed with all buckets in one codec, small tensors in FP32, as `compress` sends them.

Invariant: the same functions as `qsync_fx.replay` and `find_plan` have; nothing is reckoned here but sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from qsync_fx.communication.speeds.foreseen import by_bucket, uniform
from qsync_fx.communication.speeds.rates import Rates
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.cluster_parts import Network
from qsync_fx.predictor.replay.fleet import Coded, Played, played, sent
from qsync_fx.predictor.schedule import Schedule
from qsync_fx.timeline.timeline import Timeline

_LOWEST: Final = 1e4
_HIGHEST: Final = 1e13
"""Bytes a second between which it is looked where a codec stops to pay."""
_TURNS: Final = 60
WORTH: Final = 0.02
"""By how much of a step a codec has to make it shorter for it to pay: about what steps are foreseen to."""


@dataclass(frozen=True)
class Paying:
    """A step with gradients in one codec.

    Attributes:
        codec: its name; what DistributedDataParallel does itself is "none".
        sent: bytes that a rank sends, or the ranks of a node together to others.
        seconds: from one step to the next.
        coding: seconds that a rank codes and decodes in a step.
        communicating: seconds that the stream of communication is at work, coding included.
        waiting: of these, what a device waits for.
        until: bytes a second of a link from which on a codec no longer pays; 0 where it never does, None where it always does.
        inside: bytes that a rank sends inside its node, where several share one.
    """

    codec: str
    sent: float
    seconds: float
    coding: float
    communicating: float
    waiting: float
    until: float | None = 0.0
    inside: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of communication that computing hides."""
        return 1 - self.waiting / self.communicating if self.communicating else 1.0


NONE: Final = "none"


def paying(
    schedules: Mapping[str, Schedule], fleet: Cluster, codecs: Sequence[str], rates: Rates
) -> tuple[Paying, list[Paying]]:
    """Returns a step without codecs, and one in each; the cluster has a network with a bandwidth, and two ranks or more."""
    parameters = next(iter(schedules.values())).parameters
    found = []
    for codec in codecs:
        how = by_bucket(schedules, fleet, uniform(parameters, codec), rates)
        one = _paying(codec, played(schedules, fleet, how))
        found.append(replace(one, until=_until(schedules, fleet, how)))
    return _paying(NONE, played(schedules, fleet)), found


def best(without: Paying, found: Sequence[Paying]) -> Paying:
    """Returns what takes the least seconds; without codecs where none makes a step shorter by what is `WORTH` it."""
    chosen = min(found, key=lambda one: one.seconds, default=without)
    return chosen if _pays(chosen.seconds, without.seconds) else without


def _pays(seconds: float, without: float) -> bool:
    return seconds < without * (1 - WORTH)


def _paying(codec: str, step: Played) -> Paying:
    found = Timeline(step)
    across, inside = (sum(way) for way in zip(*(sent(step.cluster, bucket) for bucket in step.buckets), strict=True))
    return Paying(
        codec,
        across,
        found.seconds,
        sum(bucket.coded.coding for bucket in step.buckets if bucket.coded is not None),
        float((step.step.arrived - step.step.sent).sum()),
        max(found.sending.values()),
        inside=inside,
    )


def _until(schedules: Mapping[str, Schedule], fleet: Cluster, how: Sequence[Coded] | None) -> float | None:
    """Returns the bandwidth from which on a codec does not pay: below it fewer bytes win more than coding costs."""

    def wins(bandwidth: float) -> bool:
        there = _at(fleet, bandwidth)
        with_it, without = (played(schedules, there, one).step.seconds for one in (how, None))
        return _pays(float(with_it), float(without))

    if not wins(_LOWEST):
        return 0.0
    if wins(_HIGHEST):
        return None
    return _bisected(wins, _LOWEST, _HIGHEST)


def _bisected(holds: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(_TURNS):
        middle = float((low * high) ** 0.5)
        low, high = (middle, high) if holds(middle) else (low, middle)
        if high / low < 1 + 1e-4:
            break
    return low


def _at(fleet: Cluster, bandwidth: float) -> Cluster:
    """Returns a cluster whose links, or those of its nodes, are all alike."""
    network = replace(fleet.network or Network(), bandwidth=bandwidth, all_reduce=[])
    devices = {name: replace(device, bandwidth=None) for name, device in fleet.devices.items()}
    return replace(fleet, devices=devices, network=network, nodes=replace(fleet.nodes, across=[]))
