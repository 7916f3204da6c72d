"""`qsync_fx.replay`: timeline of a training step from plans and profiles.

Invariant: one device needs a plan and a profile; several need a cluster, and a plan and a profile
for each device class. Missing inputs raise an error that names them before the replay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from qsync_fx.errors import PlanError
from qsync_fx.formats import FORMATS
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import HoldsPlan, given_plan, read_plan
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.predictor.memory import peak_bytes
from qsync_fx.predictor.replayer.cluster import Cluster
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.predictor.replayer.trace_schedules import played_traces, read_steps
from qsync_fx.serialization import Path
from qsync_fx.timeline.codec_costs import compression
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
            device that runs the same formats. For other devices, make one with
            `qsync_fx.catalog_profile`.
        cluster: devices and links, or the path of its TOML file; not needed for one device.
        any_machine: whether the file of a single unnamed profile may be measured on another machine
            or with other versions of torch or qsync_fx. Profiles of a cluster, and predicted ones,
            always may.

    Raises:
        ProfileError: the cluster is invalid, a plan or profile is missing or rejected, or a
            duration is unknown.
        PlanError: a plan is invalid, or of another model.
    """
    plans, codecs = _plans(plan)
    fleet, profiles = load_device_profiles(profile, cluster, len(plans), any_machine)
    plans = for_all(plans, fleet)
    fleet.check_names(plans, "plans")
    mappers = {name: _mapper(name, plans[name], profiles[name]) for name in fleet.devices}
    schedules = {
        name: mapper.schedule(fleet.buckets.whole_graphs) for name, mapper in mappers.items()
    }
    peaks = {
        name: _peak(mapper, profiles[name], fleet.ranks > 1) for name, mapper in mappers.items()
    }
    available = {name: peak for name, peak in peaks.items() if peak is not None}
    step = simulate(schedules, fleet, compression(schedules, fleet, codecs, profiles))
    return Timeline(step, available, conditions(profiles))


def replay_traces(
    traces: Mapping[str, Path],
    execution: Mapping[str, Path] | None = None,
    *,
    cluster: Cluster | Path | None = None,
) -> Timeline:
    """Return the timeline of the typical step of traced runs, or of that step on a cluster.

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
        raise PlanError(
            f"{inputs!r} is a format, not a plan",
            where="plan",
            do=f"pass Plan.uniform({inputs!r}) to run every operator in this format",
        )
    if isinstance(inputs, str | os.PathLike):
        return read_plan(inputs)
    raise PlanError(
        f"a value of type {type(inputs).__name__} is not a plan",
        where="plan",
        do="pass a Plan, a ClusterPlan, the result of find_plan, or the path of a saved plan",
    )


def _mapper(name: str, plan: Plan, profile: DeviceInputs) -> CostMapper:
    times = profile if isinstance(profile, DeviceTimes) else profile.times()
    return CostMapper(graph_of(name, profile), times, plan)


def _peak(mapper: CostMapper, profile: DeviceInputs, sends: bool) -> int | None:
    """Return the peak memory in bytes; None if the optimizer's memory is unknown."""
    training = training_of(profile, sends)
    if training is None:
        return None
    return peak_bytes(mapper.states(), training)
