"""What is known of the devices of a cluster: a profile of each class, from its file, or reckoned by the catalog.

Invariant: for each class of the cluster there is one, of a model that is known. What is missing is an error that says what.

Whether devices train the samples that a cluster's file says, which is what samples a second are reckoned from.

Invariant: a profile does not hold which size of its model is the batch, so what is found here is a warning and never an error.
"""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Protocol, cast

from qsync_fx.communication.codecs import PLAIN
from qsync_fx.devices.device_catalog import get
from qsync_fx.devices.device_model import Device as DeviceOfCatalog
from qsync_fx.devices.machine import Machine, here_for
from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.analytic_times import ADAMW, DeviceTimes, explained_for, moved_bytes
from qsync_fx.predictor.memory.outside_passes import TrainingMemory
from qsync_fx.predictor.model.model_graph import ModelGraph
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Network
from qsync_fx.predictor.times import Times
from qsync_fx.serialization.schema import Path

_LEADING: Final = 2
"""Sizes of a tensor among which the batch is: the first, or behind the length of sequences the second."""
_SOME: Final = 8
"""Of which so many are told."""


def tell_of_other_batches(fleet: Cluster, graphs: Mapping[str, ModelGraph]) -> None:
    """Warns of classes of devices whose profile is of other samples in a step than the cluster says: seconds and memory are the profile's.

    Args:
        graphs: by class, the model that its profile is of.
    """
    for name, device in fleet.devices.items():
        leading = _leading_sizes(graphs[name])
        if (
            device.batch is None
            or not leading
            or str(device.batch) in leading
            or not all(map(str.isdigit, leading))
        ):
            continue
        existing = ", ".join(sorted(leading, key=int)[:_SOME])
        warnings.warn(
            f"devices.{name}: the cluster says batch = {device.batch}, and no tensor of the model that its profile is of has so many "
            f"samples (first sizes are {existing}): seconds and memory are those of the profile's batch, and samples a second are wrong. "
            "Measure with that batch, or say the one that was measured",
            stacklevel=3,
        )


def _leading_sizes(graph: ModelGraph) -> set[str]:
    """Returns the first sizes of what operators make, of two or more; symbols where they are no numbers."""
    result = (re.search(r"\[(.+)\]", operator.shape) for operator in graph.operators)
    sizes = (item.group(1).split(", ") for item in result if item is not None)
    return {size for each in sizes if len(each) > 1 for size in each[:_LEADING]}


class Profiled(Protocol):
    """What was measured of a model on a device, or stands in for that."""

    @property
    def graph(self) -> ModelGraph:
        """The model."""

    def times(self) -> Times:
        """Returns how long its operators take."""


DeviceInputs = Profiled | DeviceTimes
Given = DeviceInputs | Path

ALONE = "device"
"""The name of what is given for one device, without a name."""


def load_device_profiles(
    profile: Given | Mapping[str, Given],
    cluster: Cluster | Path | None,
    plans: int = 1,
    any_machine: bool = True,
) -> tuple[Cluster, dict[str, DeviceInputs]]:
    """Returns the cluster, and what is known of each of its classes.

    Args:
        profile: of the device, or of each class by name; files that the cluster names need not be given.
        cluster: devices and links, or the path of a file of TOML that says them; not needed for one device.
        plans: how many there are.
        any_machine: whether the one profile of a device without a name may be of another machine. Those of a fleet are expected to be.

    Raises:
        ProfileError: the cluster is none, or a profile is missing or refused.
    """
    fleet = read_cluster(cluster)
    profiles = {name: _read(value) for name, value in by_name(profile).items()}
    if fleet is None and not any_machine and isinstance(profile, str | os.PathLike):
        _check_here(profile, profiles[ALONE])
    if fleet is None:
        fleet = _alone(profiles, plans)
    profiles = for_all(profiles, fleet)
    profiles = _with_catalog(fleet, {**profiles, **of_files(fleet, profiles)})
    fleet.check_names(profiles, "profiles")
    tell_of_other_batches(fleet, {name: graph_of(name, item) for name, item in profiles.items()})
    return _copying(_linked(fleet, profiles), profiles), profiles


def read_cluster(cluster: Cluster | Path | None) -> Cluster | None:
    """Returns a cluster that may be given as the path of its file."""
    return cluster if isinstance(cluster, Cluster) or cluster is None else Cluster.load(cluster)


def by_name(value: Any) -> dict[str, Any]:
    """Returns what is given for each class, or for one device alone."""
    return dict(value) if isinstance(value, Mapping) else {ALONE: value}


def for_all(value: Mapping[str, Any], fleet: Cluster) -> dict[str, Any]:
    """Returns what was given without a name under the name of each class."""
    if value.keys() == {ALONE} and ALONE not in fleet.devices:
        return dict.fromkeys(fleet.devices, value[ALONE])
    return dict(value)


def training_of(profile: DeviceInputs, sends: bool) -> TrainingMemory | None:
    """Returns what a step holds beside both passes, as a profile says it; None where it does not say what the optimizer takes.

    Args:
        sends: whether gradients are sent.
    """
    optimizer = getattr(profile, "optimizer_memory", None)
    if optimizer is None:
        return None
    return TrainingMemory(optimizer, buckets=sends, loss=getattr(profile, "loss_memory", None))


def graph_of(name: str, profile: DeviceInputs) -> ModelGraph:
    """Returns the model that a profile is of."""
    graph = getattr(profile, "graph", None)
    if graph is None:
        do = "give what qsync_fx.measure returned, the path of its file, or qsync_fx.catalog_profile(...)"
        message = (
            f"what was given for {shown(name)} is of type {type(profile).__name__}, and no profile"
        )
        raise ProfileError(message, where="profiles", do=do)
    if not isinstance(graph, ModelGraph):
        message = f"the profile of {shown(name)} does not say of which model it is"
        raise ProfileError(message, where="profiles", do="measure again with this version")
    return graph


def conditions(profiles: Mapping[str, DeviceInputs]) -> dict[str, str]:
    """Returns in words, for each class of devices, what was not as by default when its profile was taken, where anything was."""
    models = {name: getattr(profile, "model", None) for name, profile in profiles.items()}
    return {
        name: model.conditions
        for name, model in models.items()
        if model is not None and model.conditions
    }


def _read(value: Given) -> DeviceInputs:
    """Which machine a profile is of is the cluster's matter: it may be looked at anywhere."""
    from qsync_fx.profiler.profile import Profile

    return (
        cast(DeviceInputs, Profile.load(value, any_machine=True))
        if isinstance(value, str | os.PathLike)
        else value
    )


def _check_here(path: Path, profile: DeviceInputs) -> None:
    """Raises `ProfileError` where times of another machine would be taken for those of this one, as those that are reckoned never are."""
    from qsync_fx.profiler.profile import PROFILE, Profile

    if not isinstance(profile, Profile) or profile.machine.reckoned:
        return
    try:
        profile.machine.check(here_for(profile.machine))
    except ProfileError as error:
        raise PROFILE.within(path, error) from None


def _alone(profiles: Mapping[str, DeviceInputs], plans: int) -> Cluster:
    if len(profiles) == 1 and plans == 1:
        ((name, profile),) = profiles.items()
        # What a model was explained for may be a file of the catalog.
        owned = pathlib.PurePath(graph_of(name, profile).device).stem
        return Cluster({owned if name == ALONE else name: ClusterDevice()})
    if not profiles:
        do = "give what qsync_fx.measure returned or qsync measure wrote (--profile FILE), or a cluster that names its profiles"
        raise ProfileError("nothing says how long operators take", where="profiles", do=do)
    raise ProfileError(
        f"there are {plans} plans and {len(profiles)} profiles, and no cluster",
        where="cluster",
        do="say in a file of TOML how many devices there are of each, and what links them",
    )


def of_files(fleet: Cluster, value: Mapping[str, DeviceInputs]) -> dict[str, DeviceInputs]:
    """Returns the profiles that a cluster names and that were not given."""
    named = {name: device.profile for name, device in fleet.devices.items() if name not in value}
    return {name: _read(path) for name, path in named.items() if path is not None}


def _with_catalog(fleet: Cluster, profiles: dict[str, DeviceInputs]) -> dict[str, DeviceInputs]:
    """Returns the profiles, and what the catalog says of devices that have none."""
    missing = {name: item.device for name, item in fleet.devices.items() if name not in profiles}
    reckoned = {
        name: _reckoned(name, called, profiles)
        for name, called in missing.items()
        if called is not None
    }
    return {**profiles, **reckoned}


def _reckoned(name: str, called: str, profiles: Mapping[str, DeviceInputs]) -> DeviceInputs:
    """Returns what is known of a device by its name: the profile that was reckoned for it, so that equal devices take equally long however
    each is given, or what the catalog makes of the model of another profile."""
    if not profiles:
        message = f"nothing says which model {shown(name)} trains"
        raise ProfileError(
            message, where="profiles", do="give a profile of one class of devices, or DeviceTimes"
        )
    device, graphs = (
        get(called),
        {value: graph_of(value, profile) for value, profile in profiles.items()},
    )
    fitting = [profiles[value] for value, graph in graphs.items() if explained_for(graph, device)]
    if fitting:
        return next((item for item in fitting if _is_of(item, device)), None) or _made(
            fitting[0], device
        )
    existing = ", ".join(sorted({pathlib.PurePath(graph.device).stem for graph in graphs.values()}))
    message = f"the model was explained for {existing}, and formats run there that need not be those of {device}"
    file = f"{device}.json"
    do = (
        f'make its profile, qsync_fx.catalog_profile("{called}", model, step, batch).save("{file}") or qsync measure MODULE:CALLABLE '
        f'--device {called} --output {file}, and give it: --profile {name}={file}, or profile = "{file}" for device in the cluster\'s file'
    )
    raise ProfileError(message, where=f"devices.{name}", do=do)


def _is_of(profile: DeviceInputs, device: DeviceOfCatalog) -> bool:
    """Whether it was reckoned for a device. What a model was explained for tells GPUs apart that are called alike."""
    if isinstance(profile, DeviceTimes):
        return profile.device is device
    machine = getattr(profile, "machine", None)
    return isinstance(machine, Machine) and machine.stands_for(device)


def _made(profile: DeviceInputs, device: DeviceOfCatalog) -> DeviceTimes:
    """Returns the times of a profile's model on a device, with the optimizer and the loss that the profile knows."""
    if isinstance(profile, DeviceTimes):
        return profile.on(device)
    memory = getattr(profile, "optimizer_memory", None)
    moved = ADAMW if memory is None else moved_bytes(memory)
    without = getattr(profile, "optimizer", None) == ""
    return DeviceTimes(
        device,
        profile.graph,
        0 if without else moved,
        memory,
        loss_memory=getattr(profile, "loss_memory", None),
    )


def _copying(fleet: Cluster, profiles: Mapping[str, DeviceInputs]) -> Cluster:
    """Returns the cluster with how fast devices copy gradients, where their profiles say it and it does not."""
    devices = {
        name: replace(device, copies=_copies(profiles[name])) if device.copies is None else device
        for name, device in fleet.devices.items()
    }
    return replace(fleet, devices=devices)


def _copies(profile: DeviceInputs) -> float | None:
    """Returns the seconds in which a byte of gradients is copied: as steps took it, else as writing gradients as they are takes it, which
    are in a cache where that is measured."""
    measured = (
        item.copies for item in getattr(profile, "collectives", ()) if item.copies is not None
    )
    plain = (1 / item.encode for item in getattr(profile, "codecs", ()) if item.codec == PLAIN.name)
    return next(measured, next(plain, None))


def _linked(fleet: Cluster, profiles: Mapping[str, DeviceInputs]) -> Cluster:
    """Returns the cluster with links as a profile holds them, and devices as they are beside others, where it says nothing of its links."""
    unknown = fleet.network is None and all(
        device.bandwidth is None for device in fleet.devices.values()
    )
    result = {
        name: next(iter(getattr(profile, "collectives", ())), None)
        for name, profile in profiles.items()
    }
    if (
        (measured := next(filter(None, result.values()), None)) is None
        or not unknown
        or fleet.ranks == 1
    ):
        return fleet
    table = [(float(nbytes), seconds) for nbytes, seconds in measured.seconds]
    network = Network(
        all_reduce=table, ranks=measured.ranks, busy=measured.busy, coding=measured.coding
    )
    neighbours = {name: 1.0 if item is None else item.slowdown for name, item in result.items()}
    devices = {
        name: replace(
            device,
            slowdown=device.slowdown * neighbours[name],
            delay=device.delay + measured.buffers,
        )
        for name, device in fleet.devices.items()
    }
    return replace(fleet, devices=devices, network=network)
