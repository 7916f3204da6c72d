"""Profiles of a cluster's devices: given, from files, or predicted from the device catalog.

Invariant: each device class has a profile with a known model; a missing one is an error that names
it.
"""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

from qsync_fx.communication.codecs import PLAIN
from qsync_fx.devices.device_catalog import get
from qsync_fx.devices.device_model import Device as DeviceOfCatalog
from qsync_fx.devices.machine import Machine, here_for
from qsync_fx.errors import ProfileError, shown
from qsync_fx.formatting import many
from qsync_fx.predictor.analytic_times import (
    ADAMW,
    DeviceTimes,
    explained_for,
    moved_bytes,
)
from qsync_fx.predictor.cost_mapper.times import Times
from qsync_fx.predictor.memory.peak_memory import TrainingMemory
from qsync_fx.predictor.model.model_graph import ModelGraph
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Network, Transport
from qsync_fx.serialization.schema import Path

if TYPE_CHECKING:
    from qsync_fx.profiler.profile import Profile


def warn_about_other_batches(fleet: Cluster, graphs: Mapping[str, ModelGraph]) -> None:
    """Warn about device classes whose profile has another batch size than the cluster's file.

    It is no error, because a profile does not record which dimension is the batch.
    """
    for name, device in fleet.devices.items():
        if device.batch is None:
            continue
        # The batch is the first of several dimensions, or the second after a sequence length.
        shapes = (re.search(r"\[(.+)\]", operator.shape) for operator in graphs[name].operators)
        sizes = (shape.group(1).split(", ") for shape in shapes if shape is not None)
        leading = {size for each in sizes if len(each) > 1 for size in each[:2]}
        if not leading or str(device.batch) in leading or not all(map(str.isdigit, leading)):
            continue
        existing = ", ".join(sorted(leading, key=int)[:8])
        warnings.warn(
            f"devices.{name}: the cluster has batch = {device.batch}, but no tensor in the profile "
            f"has this batch size (leading sizes: {existing}). Predicted times and memory are for "
            "the batch of the profile, and samples per second are wrong. Measure with this batch "
            "size, or set the batch of the profile in the cluster file.",
            stacklevel=3,
        )


class Profiled(Protocol):
    """Measured profile of a model on a device, or a substitute."""

    @property
    def graph(self) -> ModelGraph: ...

    def times(self) -> Times: ...


DeviceInputs = Profiled | DeviceTimes
Given = DeviceInputs | Path | Sequence[DeviceInputs | Path]

ALONE = "device"
"""Name of the only device, if the user gave none."""


def load_device_profiles(
    profile: Given | Mapping[str, Given],
    cluster: Cluster | Path | None,
    plans: int = 1,
    any_machine: bool = True,
) -> tuple[Cluster, dict[str, DeviceInputs]]:
    """Return the cluster, and the profile of each device class.

    Args:
        profile: profile of the device, or of each device class by name; profiles that the cluster's
            file names may be omitted. A list of profiles covers several batch sizes.
        plans: number of plans.
        any_machine: whether the file of a single unnamed device may be of another machine. Profiles
            of a cluster may always be.

    Raises:
        ProfileError: the cluster is invalid, or a profile is missing or rejected.
    """
    fleet = read_cluster(cluster)
    profiles = {name: _read(value) for name, value in by_name(profile).items()}
    if fleet is None:
        if not any_machine and isinstance(profile, str | os.PathLike):
            _check_here(profile, profiles[ALONE])
        fleet = _alone(profiles, plans)
    profiles = for_all(profiles, fleet)
    profiles = {**profiles, **of_files(fleet, profiles)}
    profiles = {name: _at_batch(fleet, name, item) for name, item in profiles.items()}
    profiles = _with_catalog(fleet, profiles)
    fleet.check_names(profiles, "profiles")
    warn_about_other_batches(fleet, {name: graph_of(name, item) for name, item in profiles.items()})
    return _copying(_linked(fleet, profiles), profiles), profiles


def read_cluster(cluster: Cluster | Path | None) -> Cluster | None:
    """Return the cluster, loaded if it is a path."""
    if cluster is None or isinstance(cluster, Cluster):
        return cluster
    return Cluster.load(cluster)


def by_name(value: Any) -> dict[str, Any]:
    """Return the values by device class; a single value gets the name `ALONE`."""
    return dict(value) if isinstance(value, Mapping) else {ALONE: value}


def for_all(value: Mapping[str, Any], fleet: Cluster) -> dict[str, Any]:
    """Return an unnamed value under the name of each device class."""
    if value.keys() == {ALONE} and ALONE not in fleet.devices:
        return dict.fromkeys(fleet.devices, value[ALONE])
    return dict(value)


def training_of(profile: DeviceInputs, sends: bool) -> TrainingMemory | None:
    """Return the memory outside both passes; None if the profile has no optimizer memory."""
    optimizer = getattr(profile, "optimizer_memory", None)
    if optimizer is None:
        return None
    return TrainingMemory(optimizer, buckets=sends, loss=getattr(profile, "loss_memory", None))


def graph_of(name: str, profile: DeviceInputs) -> ModelGraph:
    """Return the model of a profile; raise `ProfileError` for other objects."""
    graph = getattr(profile, "graph", None)
    if callable(profile):
        raise model_instead_of_profile(profile)
    if graph is None:
        raise ProfileError(
            f"the value for {shown(name)} is of type {type(profile).__name__}, not a profile",
            where="profiles",
            do="pass the result of qsync_fx.measure or qsync_fx.catalog_profile, or the path of "
            "a profile",
        )
    if not isinstance(graph, ModelGraph):
        raise ProfileError(
            f"the profile of {shown(name)} does not contain its model",
            where="profiles",
            do="measure the model again with this version of qsync_fx",
        )
    return graph


def model_instead_of_profile(value: object) -> ProfileError:
    """Return the error about a model, or a function, as the profile of `find_plan`."""
    return ProfileError(
        f"find_plan requires profiles, not a model of type {type(value).__name__}",
        where="profiles",
        do="measure it first: qsync_fx.measure(model, step, batches) returns the profile of this "
        "machine; on the ranks of a running job, qsync_fx.distributed.measure_and_plan(model, "
        "step, batches) measures and plans",
    )


def conditions(profiles: Mapping[str, DeviceInputs]) -> dict[str, str]:
    """Return the non-default conditions of each profile's measurement, as text by device class."""
    models = {name: getattr(profile, "model", None) for name, profile in profiles.items()}
    texts = {name: getattr(model, "conditions", "") for name, model in models.items()}
    return {name: text for name, text in texts.items() if text}


def _read(value: Given) -> DeviceInputs:
    """Load a profile of any machine: the cluster defines the device that it is for."""
    from qsync_fx.profiler.batch_interpolation import merge_batch_sizes
    from qsync_fx.profiler.profile import Profile

    if isinstance(value, list | tuple):
        profiles = [_read(item) for item in value]
        measured = [item for item in profiles if isinstance(item, Profile)]
        if not profiles or len(measured) < len(profiles):
            message = "a list of profiles is for measured batch sizes of a device class"
            raise ProfileError(message, where="profiles", do="give results of qsync_fx.measure")
        return merge_batch_sizes(measured)
    if isinstance(value, str | os.PathLike):
        return cast(DeviceInputs, Profile.load(value, any_machine=True))
    return cast(DeviceInputs, value)


def _at_batch(fleet: Cluster, name: str, profile: DeviceInputs) -> DeviceInputs:
    """Return a profile of several batch sizes at the cluster's batch; others do not change."""
    batch = fleet.devices[name].batch if name in fleet.devices else None
    if batch is None or batch == getattr(profile, "batch_size", None):
        return profile
    return profile.at_batch(batch) if measured_batches(profile) else profile


def measured_batches(profile: DeviceInputs) -> TypeGuard[Profile]:
    """Return whether a profile covers several batch sizes."""
    from qsync_fx.profiler.profile import Profile

    return isinstance(profile, Profile) and bool(profile.batches)


def _check_here(path: Path, profile: DeviceInputs) -> None:
    """Raise `ProfileError` for a profile that was measured on another machine."""
    from qsync_fx.profiler.profile import PROFILE, Profile

    if not isinstance(profile, Profile) or profile.machine.predicted:
        return
    try:
        profile.machine.check(here_for(profile.machine))
    except ProfileError as error:
        raise PROFILE.within(path, error) from None


def _alone(profiles: Mapping[str, DeviceInputs], plans: int) -> Cluster:
    if len(profiles) == 1 and plans == 1:
        ((name, profile),) = profiles.items()
        if name == ALONE:  # the device of a model may be the path of a catalog file
            name = pathlib.PurePath(graph_of(name, profile).device).stem
        return Cluster({name: ClusterDevice()})
    if not profiles:
        raise ProfileError(
            "there is no profile with the durations of operators",
            where="profiles",
            do="pass the result of qsync_fx.measure, a file of qsync measure (--profile FILE), or "
            "a cluster that names its profiles",
        )
    raise ProfileError(
        f"{many(plans, 'plan')} and {many(len(profiles), 'profile')} require a cluster",
        where="cluster",
        do="describe the number of devices of each class and their links in a TOML file",
    )


def of_files(fleet: Cluster, value: Mapping[str, DeviceInputs]) -> dict[str, DeviceInputs]:
    """Return the profiles that the cluster's file names and the caller did not give."""
    named = {name: device.profile for name, device in fleet.devices.items() if name not in value}
    return {name: _read(path) for name, path in named.items() if path is not None}


def _with_catalog(fleet: Cluster, profiles: dict[str, DeviceInputs]) -> dict[str, DeviceInputs]:
    """Return the profiles, with predictions for devices of the catalog that have none."""
    predicted = {
        name: _predicted(name, item.device, profiles)
        for name, item in fleet.devices.items()
        if name not in profiles and item.device is not None
    }
    return {**profiles, **predicted}


def _predicted(name: str, called: str, profiles: Mapping[str, DeviceInputs]) -> DeviceInputs:
    """Return a predicted profile of a catalog device, from one for it or for equal formats."""
    if not profiles:
        message = f"the model that {shown(name)} trains is unknown"
        do = "pass a profile of one class of devices, or DeviceTimes"
        raise ProfileError(message, where="profiles", do=do)
    device = get(called)
    graphs = {value: graph_of(value, profile) for value, profile in profiles.items()}
    fitting = [profiles[value] for value, graph in graphs.items() if explained_for(graph, device)]
    if fitting:
        same = (profile for profile in fitting if _is_of(profile, device))
        return next(same, None) or _made(fitting[0], device)
    existing = ", ".join(sorted({pathlib.PurePath(graph.device).stem for graph in graphs.values()}))
    file = f"{device}.json"
    raise ProfileError(
        f"the profiles are for {existing}, which may support other formats than {device}",
        where=f"devices.{name}",
        do=f'create a profile with qsync_fx.catalog_profile("{called}", model, step, batch)'
        f'.save("{file}") or qsync measure MODULE:CALLABLE --device {called} --output {file}; '
        f"pass it with --profile {name}={file}, or replace the device in the cluster file by "
        f'profile = "{file}"',
    )


def _is_of(profile: DeviceInputs, device: DeviceOfCatalog) -> bool:
    """Return whether a profile was predicted for a device, or a GPU of the same name."""
    if isinstance(profile, DeviceTimes):
        return profile.device is device
    machine = getattr(profile, "machine", None)
    return isinstance(machine, Machine) and machine.stands_for(device)


def _made(profile: DeviceInputs, device: DeviceOfCatalog) -> DeviceTimes:
    """Return predicted times of a profile's model on a device, with the profile's memory data."""
    if isinstance(profile, DeviceTimes):
        return profile.on(device)
    memory = getattr(profile, "optimizer_memory", None)
    moved = float(ADAMW) if memory is None else moved_bytes(memory)
    if getattr(profile, "optimizer", None) == "":
        moved = 0.0
    loss = getattr(profile, "loss_memory", None)
    return DeviceTimes(device, profile.graph, moved, memory, loss_memory=loss)


def _copying(fleet: Cluster, profiles: Mapping[str, DeviceInputs]) -> Cluster:
    """Return the cluster with gradient copy times of the profiles, unless it has its own."""
    measured = {
        name: replace(device, copies=_copies(profiles[name]))
        for name, device in fleet.devices.items()
        if device.copies is None
    }
    return replace(fleet, devices={**fleet.devices, **measured})


def _copies(profile: DeviceInputs) -> float | None:
    """Return the seconds per byte to copy gradients: as measured, else of the FP32 codec."""
    for collective in getattr(profile, "collectives", ()):
        if collective.copies is not None:
            return float(collective.copies)
    # The benchmark of codecs has the gradients in a cache.
    encode = (item.encode for item in getattr(profile, "codecs", ()) if item.codec == PLAIN.name)
    return next((1 / rate for rate in encode), None)


def _linked(fleet: Cluster, profiles: Mapping[str, DeviceInputs]) -> Cluster:
    """Return the cluster with measured links and slowdown of a profile, if it defines no links."""
    bandwidths = [device.bandwidth for device in fleet.devices.values()]
    defined = fleet.network is not None or any(value is not None for value in bandwidths)
    results = {
        name: next(iter(getattr(profile, "collectives", ())), None)
        for name, profile in profiles.items()
    }
    measured = next(filter(None, results.values()), None)
    if measured is None or defined or fleet.ranks == 1:
        return fleet
    table = [(float(nbytes), seconds) for nbytes, seconds in measured.seconds]
    network = Network(
        all_reduce=table,
        ranks=measured.ranks,
        busy=measured.busy,
        coding=measured.coding,
        ring=measured.backend == "gloo",
        exchanges=measured.exchanges,
        transport=_transport(item.backend for item in results.values() if item is not None),
    )
    devices = {}
    for name, device in fleet.devices.items():
        slowdown = device.slowdown * getattr(results[name], "slowdown", 1.0)
        delay = device.delay + measured.buffers
        devices[name] = replace(device, slowdown=slowdown, delay=delay)
    return replace(fleet, devices=devices, network=network)


def _transport(backends: Iterable[str]) -> Transport:
    """Return the transport that `compress` chooses for devices with these backends."""
    return "point_to_point" if "gloo" in backends else "collective"
