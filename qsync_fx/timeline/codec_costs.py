"""Benefit of gradient codecs: step time with each codec, and the bandwidth up to which it pays.

`compression` and `rates` convert the codecs of a plan and the devices of a cluster to the
replayer's inputs, with the costs of `communication.codec_cost_model`. Under a plan with codecs all
buckets use our exchange, FP32 ones too.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from qsync_fx.communication.codec_cost_model import (
    Rates,
    by_bucket,
    of_device,
    slowed,
    slowest,
    uniform,
)
from qsync_fx.communication.codecs import PLAIN
from qsync_fx.devices.device_catalog import get, names
from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.replayer.cluster import Cluster, Network
from qsync_fx.predictor.replayer.cluster_step import (
    CompressedTransfer,
    SimulatedStep,
    sent,
    simulate,
)
from qsync_fx.predictor.times import Schedule
from qsync_fx.timeline.device_profiles import DeviceInputs, graph_of
from qsync_fx.timeline.timeline import Timeline


def compression(
    schedules: Mapping[str, Schedule],
    fleet: Cluster,
    codecs: Mapping[str, str],
    available: Mapping[str, DeviceInputs],
) -> Sequence[CompressedTransfer] | None:
    """Return the compressed transfer of each bucket; None if no parameter has a codec.

    Raises:
        ProfileError: the cluster's file also has [compression], or a parameter is not in the model.
    """
    if all(codec == PLAIN.name for codec in codecs.values()):
        return None
    if fleet.compression is not None:
        raise ProfileError(
            "both the cluster and the plan define the compression of gradients",
            where="compression",
            do="remove [compression] from the cluster file, or the codecs from the plan",
        )
    parameters = next(iter(schedules.values())).parameters
    paths = {parameter.path for parameter in parameters}
    if (strange := next((path for path in codecs if path not in paths), None)) is not None:
        raise ProfileError(
            f"the plan has a codec for the gradient of {shown(strange)}, which is not a trained "
            "parameter of the model",
            where="codecs",
            do="replay the plan with profiles of its model",
        )
    return by_bucket(schedules, fleet, codecs, rates(fleet, available))


def rates(fleet: Cluster, available: Mapping[str, DeviceInputs]) -> Rates:
    """Return the codec rates of the slowest device class."""
    return slowest(
        [
            slowed(_of_class(fleet, name, available[name]), device.slowdown)
            for name, device in fleet.devices.items()
        ]
    )


def _of_class(fleet: Cluster, name: str, profile: DeviceInputs) -> Rates:
    called = fleet.devices[name].device
    stem = pathlib.PurePath(graph_of(name, profile).device).stem
    device = None
    if isinstance(profile, DeviceTimes):
        device = profile.device
    elif called is not None or stem in names():
        device = get(called or stem)
    return of_device(device, name, getattr(profile, "codecs", ()))


_LOWEST: Final = 1e4
_HIGHEST: Final = 1e13
"""Bounds of the search for the bandwidth at which a codec stops to pay, in bytes/s."""
_TURNS: Final = 60
WORTH: Final = 0.02
"""Relative saving of step time from which a codec pays: about the accuracy of predictions."""


@dataclass(frozen=True)
class Paying:
    """Step with gradients in one codec.

    Attributes:
        codec: its name; "none" for DistributedDataParallel's own reduction.
        sent: bytes that a rank sends, or with nodes, that the ranks of a node send to others.
        seconds: step time.
        coding: seconds of encoding and decoding on a rank.
        communicating: seconds in which the communication stream is busy, coding included.
        waiting: part of them that a device waits for.
        until: bandwidth in bytes/s above which the codec does not pay; 0 if it never pays, None if
            it always does.
        inside: bytes that a rank sends within its node.
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
        """Share of communication that overlaps with computation."""
        return 1 - self.waiting / self.communicating if self.communicating else 1.0


NONE: Final = "none"


def paying(
    schedules: Mapping[str, Schedule], fleet: Cluster, codecs: Sequence[str], rates: Rates
) -> tuple[Paying, list[Paying]]:
    """Return a step without codecs, and one with each codec.

    The cluster needs a network with a bandwidth, and at least two ranks.
    """
    parameters = next(iter(schedules.values())).parameters
    result = []
    for codec in codecs:
        settings = by_bucket(schedules, fleet, uniform(parameters, codec), rates)
        item = _paying(codec, simulate(schedules, fleet, settings))
        result.append(replace(item, until=_until(schedules, fleet, settings)))
    return _paying(NONE, simulate(schedules, fleet)), result


def best(without: Paying, result: Sequence[Paying]) -> Paying:
    """Return the fastest step; the one without codecs if no codec saves at least `WORTH`."""
    chosen = min(result, key=lambda item: item.seconds, default=without)
    return chosen if _pays(chosen.seconds, without.seconds) else without


def _pays(seconds: float, without: float) -> bool:
    return seconds < without * (1 - WORTH)


def _paying(codec: str, step: SimulatedStep) -> Paying:
    result = Timeline(step)
    across, inside = (
        sum(method)
        for method in zip(*(sent(step.cluster, bucket) for bucket in step.buckets), strict=True)
    )
    return Paying(
        codec,
        across,
        result.seconds,
        sum(bucket.coded.coding for bucket in step.buckets if bucket.coded is not None),
        float((step.step.arrived - step.step.sent).sum()),
        max(result.sending.values()),
        inside=inside,
    )


def _until(
    schedules: Mapping[str, Schedule], fleet: Cluster, settings: Sequence[CompressedTransfer] | None
) -> float | None:
    """Return the bandwidth above which a codec does not pay, in bytes/s; see `Paying.until`."""

    def wins(bandwidth: float) -> bool:
        existing = _at(fleet, bandwidth)
        with_it, without = (
            simulate(schedules, existing, item).step.seconds for item in (settings, None)
        )
        return _pays(float(with_it), float(without))

    if not wins(_LOWEST):
        return 0.0
    if wins(_HIGHEST):
        return None
    return _bisected(wins, _LOWEST, _HIGHEST)


def _bisected(holds: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(_TURNS):
        middle = float((low * high) ** 0.5)
        if holds(middle):
            low = middle
        else:
            high = middle
        if high / low < 1 + 1e-4:
            break
    return low


def _at(fleet: Cluster, bandwidth: float) -> Cluster:
    """Return the cluster with this bandwidth on all links, or on all links between nodes."""
    network = replace(fleet.network or Network(), bandwidth=bandwidth, all_reduce=[])
    devices = {name: replace(device, bandwidth=None) for name, device in fleet.devices.items()}
    return replace(fleet, devices=devices, network=network, nodes=replace(fleet.nodes, across=[]))
