"""Training step of a cluster, simulated from one schedule per device class.

All devices exchange the same list of buckets, in the order in which gradients become ready on the
first class, as DDP uses rank 0's order. Devices of a class are equal, so one of them is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Compression
from qsync_fx.predictor.replayer.collectives import ddp_buckets, share
from qsync_fx.predictor.replayer.device_timeline import (
    Array,
    DeviceStep,
    Local,
    arrival,
    local,
    steady,
)
from qsync_fx.predictor.times import Entry, Parameter, Part, Schedule


@dataclass(frozen=True)
class CompressedTransfer:
    """Transfer of a bucket by a codec, on the communication thread, while the device computes.

    A large bucket is split into chunks: one travels while the next one is encoded. With several
    ranks per node this applies between nodes. The exchange within a node runs before and after it
    without overlap: values are copied, then sent, then summed. Buckets do not overlap each other.

    Attributes:
        codec: name of the codec.
        nbytes: encoded bytes that a rank, or all ranks of a node, contribute instead of gradients,
            as the equivalent all-reduce size.
        seconds: time to encode and decode the exchange between ranks, or nodes.
        phases: number of phases of the exchange.
        inside: bytes that a rank contributes within its node, if several ranks share one.
        stretches: number of chunks per phase; 1 for no overlap of coding and transfer.
        inside_seconds: time to copy and sum the FP32 exchange within the node.
    """

    codec: str
    nbytes: float
    seconds: float
    phases: int
    inside: float = 0.0
    stretches: int = 1
    inside_seconds: float = 0.0

    @property
    def coding(self) -> float:
        """Time that the communication thread computes, without waiting for a link, in seconds."""
        return self.seconds + self.inside_seconds

    def with_travel(self, seconds: float, inside: float = 0.0) -> float:
        """Return the total duration of the exchange in seconds.

        The longer one of coding and transfer overlaps all but one chunk of the shorter one. The
        exchange within nodes is sequential.

        Args:
            seconds: transfer time between ranks, or nodes.
            inside: transfer time within nodes.
        """
        between = max(seconds, self.seconds) + min(seconds, self.seconds) / self.stretches
        return between + inside + self.inside_seconds


@dataclass(frozen=True)
class SimulatedBucket:
    """Bucket of gradients that travel together.

    Attributes:
        parameters: paths of its parameters.
        nbytes: bytes of the gradients.
        travelling: bytes of the transfer.
        coded: transfer by a codec; None if DistributedDataParallel sends the bucket itself.
    """

    parameters: tuple[str, ...]
    nbytes: int
    travelling: float
    coded: CompressedTransfer | None = None


@dataclass(frozen=True)
class SimulatedStep:
    """Step of a cluster.

    Attributes:
        cluster: the cluster.
        devices: timeline of one device of each class without others, by class name.
        buckets: buckets in sending order; empty for one device.
        step: timeline of the step; its device axis has the order of `devices`.
    """

    cluster: Cluster
    devices: Mapping[str, Local]
    buckets: tuple[SimulatedBucket, ...]
    step: DeviceStep

    def after(self, name: str) -> float:
        """Return the time from a device's last computation or transfer to its next step."""
        return after(self.devices[name].optimizer, self.cluster.devices[name], _whole(self.buckets))

    def returned(self, name: str) -> float:
        """Return the part of `after` in which the device copies gradients out of buckets."""
        return returned(self.cluster.devices[name], _whole(self.buckets))


def simulate(
    schedules: Mapping[str, Schedule],
    cluster: Cluster,
    compression: Sequence[Compression | CompressedTransfer | None] | None = None,
    *,
    indices: Sequence[Sequence[int]] | None = None,
    transfer: Sequence[float] | None = None,
    later: Sequence[float] | None = None,
) -> SimulatedStep:
    """Return a steady-state step of a cluster.

    Args:
        schedules: schedule of each device class.
        cluster: devices and links.
        compression: compression of each bucket; None for the cluster's compression of all buckets.
        indices: parameters of each bucket; None for DDP's buckets.
        transfer: duration of each transfer in seconds, including coding; None for `travel`.
        later: computation delay of each device per bucket in seconds; None for `beside_computing`.

    Raises:
        ProfileError: the schedules belong to different models or do not match the device classes.
    """
    cluster.check_names(schedules, "schedules")
    parameters = _same_parameters(schedules)
    if indices is None:
        indices = buckets_of(schedules, cluster)
    settings: list[Compression | CompressedTransfer | None] = (
        [cluster.compression] * len(indices) if compression is None else list(compression)
    )
    if len(settings) != len(indices):
        message = f"compression of {len(settings)} buckets for {len(indices)}"
        raise ProfileError(message, where="compression", do="give one for each bucket, or None")
    buckets = tuple(
        _bucket(parameters, selected, item)
        for selected, item in zip(indices, settings, strict=True)
    )
    used = travel(cluster, buckets) if transfer is None else np.array(transfer, dtype=float)
    if later is None:
        later = beside_computing(cluster, buckets, used)
    neighbours = _entries(dict(enumerate(later)))
    devices = {
        name: local(
            schedules[name],
            indices,
            slowdown=item.slowdown,
            launch=item.launch,
            extra=_sending(item, settings, buckets),
            neighbours=neighbours,
        )
        for name, item in cluster.devices.items()
    }
    return SimulatedStep(cluster, devices, buckets, _steady(devices, cluster, buckets, used))


def travel(cluster: Cluster, buckets: Sequence[SimulatedBucket]) -> Array:
    """Return the communication time of each bucket in seconds: transfer and coding."""
    used = np.zeros(len(buckets))
    plain = [index for index, bucket in enumerate(buckets) if bucket.coded is None]
    if plain:
        used[plain] = cluster.all_reduce.seconds(
            [buckets[index].travelling for index in plain], cluster.ranks
        )
    for index, seconds in _links(cluster, buckets).items():
        settings = buckets[index].coded
        assert settings is not None, "_links has compressed buckets only"
        used[index] = settings.with_travel(*seconds)
    return used


def _links(cluster: Cluster, buckets: Sequence[SimulatedBucket]) -> dict[int, tuple[float, float]]:
    """Return the transfer times of each encoded bucket between ranks or nodes, and within nodes."""
    coded = [
        (index, bucket, bucket.coded)
        for index, bucket in enumerate(buckets)
        if bucket.coded is not None
    ]
    if not coded:
        return {}
    levels, result = cluster.exchange, {}
    for index, bucket, settings in coded:
        (within,) = levels.inside.seconds([settings.inside], levels.size)
        (between,) = levels.across.seconds(
            [bucket.travelling], cluster.ranks // levels.size, settings.phases
        )
        result[index] = float(between), float(within)
    return result


def sent(cluster: Cluster, bucket: SimulatedBucket) -> tuple[float, float]:
    """Return the bytes of a bucket that a node sends over its link, and a rank within its node."""
    size, settings = cluster.nodes.ranks, bucket.coded
    if settings is None and cluster.nodes.ring:
        full = share(cluster.ranks) * bucket.travelling
        return full * (size < cluster.ranks), full * (size > 1)
    inside = bucket.travelling
    if settings is not None:
        inside = settings.inside
    return share(cluster.ranks // size) * bucket.travelling, share(size) * inside


def buckets_of(schedules: Mapping[str, Schedule], cluster: Cluster) -> list[list[int]]:
    """Return the parameters of each bucket of DistributedDataParallel; empty for one device."""
    if cluster.ranks == 1:
        return []
    schedule = schedules[next(iter(cluster.devices))]
    return ddp_buckets(
        [parameter.numel for parameter in schedule.parameters],
        [parameter.dtype_bytes for parameter in schedule.parameters],
        arrival=arrival(schedule),
        limits=(cluster.buckets.first_bytes, cluster.buckets.bytes),
    )


def after(optimizer: float, device: ClusterDevice, nbytes: int) -> float:
    """Return the time from the last computation and transfer to the end of the step, in seconds.

    Args:
        nbytes: bytes of gradients to copy out of the buckets.
    """
    return optimizer + device.delay + returned(device, nbytes)


def returned(device: ClusterDevice, nbytes: int) -> float:
    """Return the time in which a device copies gradients out of their buckets, in seconds."""
    return _copied(device, nbytes) * device.slowdown


def before_sending(
    device: ClusterDevice, settings: Compression | CompressedTransfer | None, nbytes: int
) -> float:
    """Return a device's time for a bucket before it is sent, without `slowdown`, in seconds."""
    copying = _copied(device, nbytes)
    if isinstance(settings, Compression):
        return settings.fixed + settings.each * nbytes + copying
    return copying


def beside_computing(
    cluster: Cluster, buckets: Sequence[SimulatedBucket], used: Sequence[float] | Array
) -> list[float]:
    """Return the computation delay of each device per bucket, without `slowdown`, in seconds.

    Sending and coding occupy cores for the shares `Network.busy` and `Network.coding` of their
    times. Coding continues while another chunk of the bucket travels.

    Args:
        used: communication time of each bucket in seconds, including coding.
    """
    network = cluster.network
    if network is None:
        return [0.0] * len(buckets)
    coding = network.coding
    if coding is None:
        coding = min(1.0, network.busy)
    # Coding times refer to the slowest device, and `slowdown` is applied per device later.
    coding /= max(device.slowdown for device in cluster.devices.values())

    result = [network.busy * float(seconds) for seconds in used]
    for index, seconds in _links(cluster, buckets).items():
        transfer = buckets[index].coded
        assert transfer is not None, "_links has compressed buckets only"
        result[index] = network.busy * sum(seconds) + coding * transfer.coding
    return result


def _copied(device: ClusterDevice, nbytes: int) -> float:
    """Return the time to copy gradients in one direction, without `slowdown`, in seconds."""
    return (device.copies or 0.0) * nbytes


def _sending(
    device: ClusterDevice,
    settings: Sequence[Compression | CompressedTransfer | None],
    buckets: Sequence[SimulatedBucket],
) -> dict[int, Entry]:
    """Return by bucket the work of the device before it is sent."""
    each = enumerate(zip(settings, buckets, strict=True))
    seconds = {index: before_sending(device, item, bucket.nbytes) for index, (item, bucket) in each}
    return _entries(seconds)


def _entries(seconds: Mapping[int, float]) -> dict[int, Entry]:
    return {index: Entry("", Part.OUTSIDE, item) for index, item in seconds.items() if item}


def _whole(buckets: Sequence[SimulatedBucket]) -> int:
    return sum(bucket.nbytes for bucket in buckets)


def _steady(
    devices: Mapping[str, Local],
    cluster: Cluster,
    buckets: Sequence[SimulatedBucket],
    transfer: Array,
) -> DeviceStep:
    between = [
        after(devices[name].optimizer, item, _whole(buckets))
        for name, item in cluster.devices.items()
    ]
    return steady(
        np.stack([item.ready for item in devices.values()]),
        np.array([item.computed for item in devices.values()]),
        np.array(between),
        transfer,
        cluster.overlap,
    )


def _bucket(
    parameters: Sequence[Parameter],
    selected: Sequence[int],
    settings: Compression | CompressedTransfer | None,
) -> SimulatedBucket:
    chosen = [parameters[index] for index in selected]
    nbytes = sum(parameter.numel * parameter.dtype_bytes for parameter in chosen)
    paths = tuple(parameter.path for parameter in chosen)
    if isinstance(settings, CompressedTransfer):
        return SimulatedBucket(paths, nbytes, settings.nbytes, settings)
    if settings is None:
        return SimulatedBucket(paths, nbytes, float(nbytes))
    return SimulatedBucket(paths, nbytes, nbytes * settings.ratio)


def _same_parameters(schedules: Mapping[str, Schedule]) -> tuple[Parameter, ...]:
    """Return the parameters, which must be equal in all schedules."""
    (first, schedule), *others = schedules.items()
    for name, other in others:
        if other.parameters != schedule.parameters:
            ours, theirs = (
                {item.path: item for item in step.parameters} for step in (schedule, other)
            )
            differs = next(
                (path for path in (ours | theirs) if ours.get(path) != theirs.get(path)),
                "their order",
            )
            raise ProfileError(
                f"the devices {shown(first)} and {shown(name)} train different parameters: "
                f"{shown(differs)}",
                where="schedules",
                do="profile the same model on each class of devices",
            )
    return schedule.parameters
