"""Which codec pays: a step with gradients in each, at a bandwidth, and from which bandwidth on it takes longer than without.

A step is replayed with all buckets in one codec, small tensors in FP32, as `compress` sends them.

Invariant: the same functions as `qsync_fx.replay` and `find_plan` have; nothing is reckoned here but sums.

What a plan's codecs make of the buckets of a cluster, and how fast its devices code, from what is known of them.

Invariant: rates that are reckoned say from what. A plan that compresses nothing leaves buckets to DistributedDataParallel; under any other
all of them go through our exchange, those in FP32 too.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from qsync_fx.communication.codec_cost_model import (
    COPY,
    Rates,
    by_bucket,
    of_copy,
    of_gpu,
    of_speeds,
    slowed,
    slowest,
    uniform,
)
from qsync_fx.communication.codecs import PLAIN
from qsync_fx.devices.device_catalog import get, names
from qsync_fx.devices.device_model import Device
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
    """Returns what is done to each bucket where parameters have codecs; None where nothing is compressed.

    Raises:
        ProfileError: the cluster's file says what is done to gradients, too, or a parameter is none of the model.
    """
    if all(codec == PLAIN.name for codec in codecs.values()):
        return None
    if fleet.compression is not None:
        do = "leave [compression] out of the cluster's file, or codecs out of the plan"
        raise ProfileError(
            "both the cluster and the plan say what is done to gradients",
            where="compression",
            do=do,
        )
    parameters = next(iter(schedules.values())).parameters
    paths = {parameter.path for parameter in parameters}
    if (strange := next((path for path in codecs if path not in paths), None)) is not None:
        message = f"the plan has a codec for the gradient of {shown(strange)}, which the model does not train"
        raise ProfileError(message, where="codecs", do="replay the plan with profiles of its model")
    return by_bucket(schedules, fleet, codecs, rates(fleet, available))


def rates(fleet: Cluster, available: Mapping[str, DeviceInputs]) -> Rates:
    """Returns the rates of the slowest class of devices."""
    return slowest(
        [
            slowed(_of_class(fleet, name, available[name]), device.slowdown)
            for name, device in fleet.devices.items()
        ]
    )


def of_catalog(device: Device) -> Rates:
    """Returns what codecs make of the memory of a device, of which a copy reads and writes each byte."""
    copy, host = device.memory.bandwidth * device.memory.fraction / 2, device.memory.host
    if host:
        text = f"its memory copies {copy / 1e9:.3g} GB/s, and {host / 1e9:.3g} GB/s go to its host"
        return of_gpu(copy, host, f"reckoned for {device.title}: {text}")
    return of_copy(copy, f"reckoned for {device.title}: its memory copies {copy / 1e9:.3g} GB/s")


def _of_class(fleet: Cluster, name: str, profile: DeviceInputs) -> Rates:
    if speeds := getattr(profile, "codecs", ()):
        return of_speeds(speeds, f"measured on {name}")
    called = fleet.devices[name].device
    stem = pathlib.PurePath(graph_of(name, profile).device).stem
    if isinstance(profile, DeviceTimes):
        return of_catalog(profile.device)
    if called is not None or stem in names():
        return of_catalog(get(called or stem))
    return of_copy(COPY, f"reckoned for {name}: a core that copies {COPY / 1e9:.3g} GB/s")


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
    result = []
    for codec in codecs:
        settings = by_bucket(schedules, fleet, uniform(parameters, codec), rates)
        item = _paying(codec, simulate(schedules, fleet, settings))
        result.append(replace(item, until=_until(schedules, fleet, settings)))
    return _paying(NONE, simulate(schedules, fleet)), result


def best(without: Paying, result: Sequence[Paying]) -> Paying:
    """Returns what takes the least seconds; without codecs where none makes a step shorter by what is `WORTH` it."""
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
    """Returns the bandwidth from which on a codec does not pay: below it fewer bytes win more than coding costs."""

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
        low, high = (middle, high) if holds(middle) else (low, middle)
        if high / low < 1 + 1e-4:
            break
    return low


def _at(fleet: Cluster, bandwidth: float) -> Cluster:
    """Returns a cluster whose links, or those of its nodes, are all alike."""
    network = replace(fleet.network or Network(), bandwidth=bandwidth, all_reduce=[])
    devices = {name: replace(device, bandwidth=None) for name, device in fleet.devices.items()}
    return replace(fleet, devices=devices, network=network, nodes=replace(fleet.nodes, across=[]))
