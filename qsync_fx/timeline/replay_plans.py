"""`qsync_fx.replay`: timeline of a training step from plans and profiles; benefit of codecs.

Several devices need a cluster, and a plan and a profile for each device class. Missing inputs raise
an error that names them before the replay. Under a plan with codecs all buckets use our exchange,
FP32 ones too; `communication.codec_cost_model` has its costs.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
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
from qsync_fx.devices.device_catalog import canonical, get
from qsync_fx.errors import PlanError, ProfileError, shown
from qsync_fx.formats import FORMATS
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import HoldsPlan, codes_inside, given_plan, read_plan
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.predictor.cost_mapper.times import Schedule
from qsync_fx.predictor.memory import peak_bytes
from qsync_fx.predictor.replayer.cluster import Cluster, Network
from qsync_fx.predictor.replayer.cluster_step import (
    CompressedTransfer,
    SimulatedStep,
    sent,
    simulate,
)
from qsync_fx.predictor.replayer.trace_schedules import played_traces, read_steps
from qsync_fx.serialization import Path
from qsync_fx.timeline.device_profiles import (
    ALONE,
    DeviceInputs,
    Given,
    by_name,
    conditions,
    for_all,
    graph_of,
    load_device_profiles,
    read_cluster,
    training_of,
)
from qsync_fx.timeline.timeline import Timeline

GivenPlan = Plan | ClusterPlan | HoldsPlan | Path


def replay(
    plan: GivenPlan | Mapping[str, GivenPlan],
    profile: Given | Mapping[str, Given],
    *,
    cluster: Cluster | Path | None = None,
    any_machine: bool = False,
) -> Timeline:
    """Return the predicted timeline of a training step.

    Args:
        plan: plan of the device, or of each device class by name: a plan, the result of
            `find_plan`, or a path. A single plan is for all classes. If a cluster plan has codecs,
            gradients are compressed with them.
        profile: profile of the device, or of each device class by name; may also be a path.
            Profiles that the cluster's file names may be omitted. For a device of the catalog, a
            profile predicted for the same device is used, or one is predicted from the model of a
            device that runs the same formats (else see `qsync_fx.catalog_profile`).
        cluster: devices and links, or the path of its TOML file; not needed for one device.
        any_machine: whether the file of a single unnamed profile may be measured on another machine
            or with other versions. Profiles of a cluster, and predicted ones, always may.

    Raises:
        ProfileError: a plan, profile, cluster or duration is invalid or missing.
        PlanError: a plan is invalid, or of another model.
    """
    plans, codecs = _plans(plan)
    fleet, profiles = load_device_profiles(profile, cluster, len(plans), any_machine)
    plans = for_all(plans, fleet)
    fleet.check_names(plans, "plans")
    schedules, peaks = {}, {}
    for name in fleet.devices:
        inputs = profiles[name]
        times = inputs if isinstance(inputs, DeviceTimes) else inputs.times()
        mapper = CostMapper(graph_of(name, inputs), times, plans[name])
        schedules[name] = mapper.schedule(fleet.buckets.whole_graphs)
        training = training_of(inputs, sends=fleet.ranks > 1)
        if training is not None:
            peaks[name] = peak_bytes(mapper.states(), training)
    step = simulate(schedules, fleet, compression(schedules, fleet, codecs, profiles))
    return Timeline(step, peaks, conditions(profiles))


def replay_traces(
    traces: Mapping[str, Path],
    execution: Mapping[str, Path] | None = None,
    *,
    cluster: Cluster | Path | None = None,
) -> Timeline:
    """Return the timeline of the typical step of traced runs, on another cluster if given.

    Args:
        traces: Kineto traces of each rank by name; with a cluster, of one rank of each device
            class.
        execution: execution traces of the same runs, by the same names.
        cluster: cluster to replay on; by default the traced one.

    Raises:
        ProfileError: a trace is invalid, incomplete, or inconsistent with the others.
    """
    fleet = read_cluster(cluster)
    read = {name: read_steps(path, (execution or {}).get(name)) for name, path in traces.items()}
    return Timeline(played_traces(read, fleet))


def _plans(value: GivenPlan | Mapping[str, GivenPlan]) -> tuple[dict[str, Plan], Mapping[str, str]]:
    """Return the plan of each device class, and the codec of each parameter that has one."""
    plans: dict[str, Plan] = {}
    codecs: dict[str, str] = {}
    for name, item in by_name(value).items():
        plan = _plan(item)
        if isinstance(plan, Plan):
            plans[name] = plan
        else:
            plans |= plan.classes if name == ALONE else {name: plan.for_class(name)}
            codecs |= plan.codecs
    return plans, codecs


def _plan(result: object) -> Plan | ClusterPlan:
    inputs = given_plan(result)
    if isinstance(inputs, Plan | ClusterPlan):
        return inputs
    if isinstance(inputs, str) and inputs in FORMATS:
        message = f"{inputs!r} is a format, not a plan"
        do = f"pass Plan.uniform({inputs!r}) to run every operator in this format"
        raise PlanError(message, where="plan", do=do)
    if isinstance(inputs, str | os.PathLike):
        return read_plan(inputs)
    message = f"a value of type {type(inputs).__name__} is not a plan"
    do = "pass a Plan, a ClusterPlan, the result of find_plan, or the path of a saved plan"
    raise PlanError(message, where="plan", do=do)


def compression(
    schedules: Mapping[str, Schedule],
    fleet: Cluster,
    codecs: Mapping[str, str],
    available: Mapping[str, DeviceInputs],
) -> Sequence[CompressedTransfer] | None:
    """Return the compressed transfer of each bucket; None if no parameter has a codec."""
    if all(codec == PLAIN.name for codec in codecs.values()):
        return None
    if fleet.compression is not None:
        raise ProfileError(
            "both the cluster and the plan define the compression of gradients",
            where="compression",
            do="remove [compression] from the cluster file, or the codecs from the plan",
        )
    if codes_inside(codecs) and fleet.ranks_per_node == 1:
        raise ProfileError(
            "the plan codes gradients inside nodes, but each device of the cluster is a node",
            where="codecs",
            do="describe the nodes of each class in [devices.NAME.node], or plan for this cluster",
        )
    paths = {parameter.path for parameter in next(iter(schedules.values())).parameters}
    for path in codecs:
        if path not in paths:
            raise ProfileError(
                f"the plan has a codec for the gradient of {shown(path)}, which is not a trained "
                "parameter of the model",
                where="codecs",
                do="replay the plan with profiles of its model",
            )
    return by_bucket(schedules, fleet, codecs, rates(fleet, available))


def rates(fleet: Cluster, available: Mapping[str, DeviceInputs]) -> Rates:
    """Return the codec rates of the slowest device class, with the cluster's transport."""
    result, on_device = [], fleet.transport == "collective"
    for name, of_class in fleet.devices.items():
        profile, device = available[name], None
        called = of_class.device or pathlib.PurePath(graph_of(name, profile).device).stem
        if isinstance(profile, DeviceTimes):
            device = profile.device
        elif of_class.device is not None or canonical(called) is not None:
            device = get(called)
        measured = of_device(device, name, getattr(profile, "codecs", ()), on_device)
        result.append(slowed(measured, of_class.slowdown))
    return slowest(result)


_BANDWIDTHS: Final = (1e4, 1e13)
"""Bounds of the search for the bandwidth at which a codec stops to pay, in bytes/s."""
WORTH: Final = 0.02
"""Relative saving of step time from which a codec pays: about the accuracy of predictions."""


@dataclass(frozen=True)
class Paying:
    """Step with gradients in one codec.

    Attributes:
        codec: its name; "none" for DistributedDataParallel's own reduction.
        sent: bytes that a rank sends, or with nodes, that the ranks of a node send to others.
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
        return 1 - self.waiting / (self.communicating or 1.0)


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
        until = _until(schedules, fleet, settings)
        result.append(_paying(codec, simulate(schedules, fleet, settings), until))
    return _paying(NONE, simulate(schedules, fleet)), result


def best(without: Paying, result: Sequence[Paying]) -> Paying:
    """Return the fastest step; the one without codecs if no codec saves at least `WORTH`."""
    chosen = min(result, key=lambda item: item.seconds, default=without)
    if _pays(chosen.seconds, without.seconds):
        return chosen
    return without


def _pays(seconds: float, without: float) -> bool:
    return seconds < without * (1 - WORTH)


def _paying(codec: str, step: SimulatedStep, until: float | None = 0.0) -> Paying:
    result = Timeline(step)
    volumes = [sent(step.cluster, bucket) for bucket in step.buckets]
    return Paying(
        codec,
        sent=sum(across for across, _ in volumes),
        seconds=result.seconds,
        coding=sum(bucket.coded.coding for bucket in step.buckets if bucket.coded is not None),
        communicating=float((step.step.arrived - step.step.sent).sum()),
        waiting=max(result.sending.values()),
        until=until,
        inside=sum(inside for _, inside in volumes),
    )


def _until(
    schedules: Mapping[str, Schedule], fleet: Cluster, settings: Sequence[CompressedTransfer] | None
) -> float | None:
    """Return the bandwidth above which a codec does not pay, in bytes/s; see `Paying.until`."""

    def wins(bandwidth: float) -> bool:
        cluster = _at(fleet, bandwidth)
        seconds = float(simulate(schedules, cluster, settings).step.seconds)
        return _pays(seconds, float(simulate(schedules, cluster).step.seconds))

    low, high = _BANDWIDTHS
    if not wins(low):
        return 0.0
    if wins(high):
        return None
    while high / low >= 1 + 1e-4:
        middle = math.sqrt(low * high)
        if wins(middle):
            low = middle
        else:
            high = middle
    return low


def _at(fleet: Cluster, bandwidth: float) -> Cluster:
    """Return the cluster with this bandwidth on all links, or on all links between nodes."""
    network = fleet.network or Network()
    inside = [exchange for exchange in network.exchanges if exchange.group == "inside"]
    network = replace(network, bandwidth=bandwidth, all_reduce=[], exchanges=inside)
    devices = {name: replace(device, bandwidth=None) for name, device in fleet.devices.items()}
    return replace(fleet, devices=devices, network=network)
