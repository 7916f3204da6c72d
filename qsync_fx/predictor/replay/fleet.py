"""A step of a fleet, from a schedule a class of devices.

Invariant: what travels is one list of buckets for all devices, in the order in which gradients are whole on the first class, as DDP takes
it from rank 0. Devices of a class are alike, so that one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replay.buckets import ddp_buckets
from qsync_fx.predictor.replay.closed_form import Array
from qsync_fx.predictor.replay.cluster import Cluster, Compression
from qsync_fx.predictor.replay.local import Local, arrival, local
from qsync_fx.predictor.replay.step import Step, steady
from qsync_fx.predictor.schedule import Entry, Parameter, Part, Schedule


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        parameters: whose.
        nbytes: of the gradients.
        travelling: bytes that travel.
    """

    parameters: tuple[str, ...]
    nbytes: int
    travelling: float


@dataclass(frozen=True)
class Played:
    """A step of a fleet.

    Attributes:
        cluster: whose.
        devices: by name, what one of each class does when it is alone.
        buckets: what travels, in order; nothing where there is one device.
        step: when all of that happens; its axis of devices has the order of `devices`.
    """

    cluster: Cluster
    devices: Mapping[str, Local]
    buckets: tuple[Bucket, ...]
    step: Step


def played(
    schedules: Mapping[str, Schedule],
    cluster: Cluster,
    compression: Sequence[Compression | None] | None = None,
    *,
    indices: Sequence[Sequence[int]] | None = None,
    transfer: Sequence[float] | None = None,
) -> Played:
    """Returns a steady step of a fleet.

    Args:
        schedules: by class of devices.
        cluster: what devices and links there are.
        compression: for each bucket what is done to it; that of the cluster for all where None.
        indices: parameters of each bucket; those that DDP takes where None.
        transfer: seconds that each bucket travels; what the cluster's links make of its bytes where None.

    Raises:
        ProfileError: schedules of different models, of classes that the cluster has not, or none for one that it has.
    """
    cluster.check_names(schedules, "schedules")
    parameters = _same_parameters(schedules)
    if indices is None:
        indices = _of_ddp(schedules[next(iter(cluster.devices))], cluster) if cluster.ranks > 1 else []
    how = [cluster.compression] * len(indices) if compression is None else list(compression)
    if len(how) != len(indices):
        what = f"compression of {len(how)} buckets for {len(indices)}"
        raise ProfileError(what, where="compression", do="give one for each bucket, or None")
    buckets = tuple(_bucket(parameters, which, one) for which, one in zip(indices, how, strict=True))
    extra = {
        at: Entry("", Part.OUTSIDE, one.fixed + one.each * bucket.nbytes)
        for at, (one, bucket) in enumerate(zip(how, buckets, strict=True))
        if one is not None
    }
    devices = {
        name: local(schedules[name], indices, slowdown=one.slowdown, launch=one.launch, extra=extra)
        for name, one in cluster.devices.items()
    }
    if transfer is not None:
        taken: Array = np.array(transfer, dtype=float)
    else:
        sizes = [bucket.travelling for bucket in buckets]
        taken = cluster.all_reduce.seconds(sizes, cluster.ranks) if sizes else np.zeros(0)
    return Played(cluster, devices, buckets, _steady(devices, cluster, taken))


def _of_ddp(schedule: Schedule, cluster: Cluster) -> list[list[int]]:
    return ddp_buckets(
        [parameter.numel for parameter in schedule.parameters],
        [parameter.dtype_bytes for parameter in schedule.parameters],
        arrival=arrival(schedule),
        limits=(cluster.buckets.first_bytes, cluster.buckets.bytes),
    )


def _steady(devices: Mapping[str, Local], cluster: Cluster, transfer: Array) -> Step:
    between = [devices[name].optimizer + one.delay for name, one in cluster.devices.items()]
    return steady(
        np.stack([one.ready for one in devices.values()]),
        np.array([one.computed for one in devices.values()]),
        np.array(between),
        transfer,
        cluster.overlap,
    )


def _bucket(parameters: Sequence[Parameter], which: Sequence[int], compression: Compression | None) -> Bucket:
    chosen = [parameters[at] for at in which]
    nbytes = sum(parameter.numel * parameter.dtype_bytes for parameter in chosen)
    ratio = 1.0 if compression is None else compression.ratio
    return Bucket(tuple(parameter.path for parameter in chosen), nbytes, nbytes * ratio)


def _same_parameters(schedules: Mapping[str, Schedule]) -> tuple[Parameter, ...]:
    """Returns the parameters that all schedules have."""
    (first, schedule), *others = schedules.items()
    for name, other in others:
        if other.parameters != schedule.parameters:
            ours, theirs = ({one.path: one for one in step.parameters} for step in (schedule, other))
            differs = next((path for path in (ours | theirs) if ours.get(path) != theirs.get(path)), "their order")
            raise ProfileError(
                f"the devices {shown(first)} and {shown(name)} train different parameters: {shown(differs)}",
                where="schedules",
                do="profile the same model on each class of devices",
            )
    return schedule.parameters
