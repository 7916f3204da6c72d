"""`qsync_fx.replay`: from plans and profiles to a timeline.

Invariant: one device needs a plan and a profile; several need a cluster, and one of each for every class of its devices. What is missing
is an error that says what, before anything is replayed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast

from qsync_fx.codec import Path
from qsync_fx.devices import get
from qsync_fx.errors import ProfileError, shown
from qsync_fx.plan import Plan
from qsync_fx.predictor.mapper import CostMapper
from qsync_fx.predictor.memory import Training, peak_bytes
from qsync_fx.predictor.model import ModelGraph
from qsync_fx.predictor.reckoned.times import DeviceTimes
from qsync_fx.predictor.replay.cluster import Cluster, Device, Network
from qsync_fx.predictor.replay.fleet import played
from qsync_fx.predictor.replay.traces.ranks import played_traces, read_steps
from qsync_fx.predictor.times import Times
from qsync_fx.timeline.timeline import Timeline


class Profiled(Protocol):
    """What was measured of a model on a device, or stands in for that."""

    @property
    def graph(self) -> ModelGraph:
        """The model."""

    def times(self) -> Times:
        """Returns how long its operators take."""


Known = Profiled | DeviceTimes


def replay(
    plan: Plan | Mapping[str, Plan],
    profile: Known | Mapping[str, Known],
    *,
    cluster: Cluster | Path | None = None,
) -> Timeline:
    """Returns what a training step will look like.

    Args:
        plan: of the device, or of each class of devices by name. One plan for several classes is the plan of all.
        profile: likewise. Those that the cluster's file names need not be given, and devices of the catalog that it names are reckoned
            with the model of the first that is.
        cluster: devices and links, or the path of a file of TOML that says them; not needed for one device.

    Raises:
        ProfileError: the cluster is none, a plan or profile is missing, a time is not known.
        PlanError: a plan is not one of the model.
    """
    fleet = _read(cluster)
    plans, profiles = _by_name(plan), _by_name(profile)
    if fleet is None:
        fleet = _alone(plans, profiles)
    plans, profiles = _for_all(plans, fleet), _for_all(profiles, fleet)
    profiles = _with_catalog(fleet, {**profiles, **_of_files(fleet, profiles)})
    fleet.check_names(plans, "plans")
    fleet.check_names(profiles, "profiles")
    mappers = {name: _mapper(name, plans[name], profiles[name]) for name in fleet.devices}
    schedules = {name: mapper.schedule(fleet.buckets.whole_graphs) for name, mapper in mappers.items()}
    peaks = {name: _peak(mapper, profiles[name], fleet.ranks > 1) for name, mapper in mappers.items()}
    known = {name: peak for name, peak in peaks.items() if peak is not None}
    return Timeline(played(schedules, _linked(fleet, profiles)), known)


def replay_traces(
    traces: Mapping[str, Path], execution: Mapping[str, Path] | None = None, *, cluster: Cluster | Path | None = None
) -> Timeline:
    """Returns what the typical step of traced runs looked like, or would look like on a cluster.

    Args:
        traces: traces of Kineto by name, of each rank; with a cluster, of one rank of each class of devices.
        execution: execution traces of the same runs, by the same names.
        cluster: what to replay them on, in place of what was traced.

    Raises:
        ProfileError: a trace is none, is cut off, or does not go with the others.
    """
    fleet = _read(cluster)
    read = {name: read_steps(path, (execution or {}).get(name)) for name, path in traces.items()}
    return Timeline(played_traces(read, fleet))


_ALONE = "device"


def _read(cluster: Cluster | Path | None) -> Cluster | None:
    return cluster if isinstance(cluster, Cluster) or cluster is None else Cluster.load(cluster)


def _by_name(given: Any) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {_ALONE: given}


def _for_all(given: Mapping[str, Any], fleet: Cluster) -> dict[str, Any]:
    """Returns what was given without a name under the name of each class."""
    if given.keys() == {_ALONE} and _ALONE not in fleet.devices:
        return dict.fromkeys(fleet.devices, given[_ALONE])
    return dict(given)


def _alone(plans: Mapping[str, Plan], profiles: Mapping[str, Known]) -> Cluster:
    if len(profiles) == 1 and len(plans) == 1:
        ((name, profile),) = profiles.items()
        # What a model was explained for may be a file of the catalog.
        own = pathlib.PurePath(_graph(name, profile).device).stem
        return Cluster({own if name == _ALONE else name: Device()})
    raise ProfileError(
        f"there are {len(plans)} plans and {len(profiles)} profiles, and no cluster",
        where="cluster",
        do="say in a file of TOML how many devices there are of each, and what links them",
    )


def _of_files(fleet: Cluster, given: Mapping[str, Known]) -> dict[str, Known]:
    """Returns the profiles that a cluster names and that were not given."""
    from qsync_fx.profiling.profile import Profile

    named = {name: device.profile for name, device in fleet.devices.items() if name not in given}
    return {
        name: cast(Profiled, Profile.load(path, any_machine=True)) for name, path in named.items() if path is not None
    }


def _with_catalog(fleet: Cluster, profiles: dict[str, Known]) -> dict[str, Known]:
    """Returns the profiles, and what the catalog says of devices that have none."""
    reckoned: dict[str, Known] = {}
    for name, device in fleet.devices.items():
        if name not in profiles and device.device is not None:
            if not profiles:
                what = f"nothing says which model {shown(name)} trains"
                raise ProfileError(what, where="profiles", do="give a profile of one class of devices, or DeviceTimes")
            first, known = next(iter(profiles.items()))
            reckoned[name] = DeviceTimes(get(device.device), _graph(first, known))
    return {**profiles, **reckoned}


def _mapper(name: str, plan: Plan, profile: Known) -> CostMapper:
    times = profile if isinstance(profile, DeviceTimes) else profile.times()
    return CostMapper(_graph(name, profile), times, plan)


def _peak(mapper: CostMapper, profile: Known, sends: bool) -> int | None:
    """Returns the most bytes that a step holds; None where nothing says what the optimizer takes."""
    optimizer = getattr(profile, "optimizer_memory", None)
    return None if optimizer is None else peak_bytes(mapper.states(), Training(optimizer, buckets=sends))


def _graph(name: str, profile: Known) -> ModelGraph:
    graph = getattr(profile, "graph", None)
    if not isinstance(graph, ModelGraph):
        what = f"the profile of {shown(name)} does not say of which model it is"
        raise ProfileError(what, where="profiles", do="measure again with this version")
    return graph


def _linked(fleet: Cluster, profiles: Mapping[str, Known]) -> Cluster:
    """Returns the cluster with all-reduces that a profile holds, where it says nothing of its links."""
    unknown = fleet.network is None and all(device.bandwidth is None for device in fleet.devices.values())
    if not unknown or fleet.ranks == 1:
        return fleet
    for profile in profiles.values():
        for measured in getattr(profile, "collectives", ()):
            table = [(float(nbytes), seconds) for nbytes, seconds in measured.seconds]
            return replace(fleet, network=Network(all_reduce=table, ranks=measured.ranks))
    return fleet
