"""Training step of a cluster, simulated from one schedule per device class.

All devices exchange the same list of buckets, in the order in which gradients become ready on the
first class, as DDP uses rank 0's order. Devices of a class are equal, so one of them is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import numpy as np

from qsync_fx.devices.roofline import share
from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.cost_mapper.times import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Compression
from qsync_fx.predictor.replayer.collectives import ddp_buckets
from qsync_fx.predictor.replayer.device_timeline import (
    Array,
    DeviceStep,
    Local,
    arrival,
    local,
    steady,
)


@dataclass(frozen=True)
class CompressedTransfer:
    """Transfer of a bucket by a codec, on the communication thread, while the device computes.

    A large bucket is split into chunks: one travels while the next one is encoded. With several
    ranks per node this applies between nodes; the exchange within a node does not overlap it.

    Attributes:
        nbytes: encoded bytes that a rank, or all ranks of a node, contribute.
        seconds: time to encode and decode the exchange between ranks, or nodes.
        inside: bytes that a rank contributes within its node, if several ranks share one.
        stretches: number of chunks per phase; 1 for no overlap of coding and transfer.
        inside_seconds: time to encode, decode and sum the exchange within the node.
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
        """Seconds that the communication thread computes."""
        return self.seconds + self.inside_seconds

    def with_travel(self, seconds: float, inside: float = 0.0) -> float:
        """Return the duration of the exchange for these transfer times between and within nodes.

        The longer one of coding and transfer overlaps all but one chunk of the shorter one. The
        exchange within nodes is sequential.
        """
        between = max(seconds, self.seconds) + min(seconds, self.seconds) / self.stretches
        return between + inside + self.inside_seconds


@dataclass(frozen=True)
class SimulatedBucket:
    """Bucket of `nbytes` bytes of gradients that travel together as `travelling` bytes.

    `coded` is the transfer by a codec; None if DistributedDataParallel sends the bucket itself.
    """

    parameters: tuple[str, ...]
    nbytes: int
    travelling: float
    coded: CompressedTransfer | None = None


@dataclass(frozen=True)
class SimulatedStep:
    """Step of a cluster, with the timeline of one device of each class alone, and of all devices.

    The `buckets` are in sending order; there are none for one device.
    """

    cluster: Cluster
    devices: Mapping[str, Local]
    buckets: tuple[SimulatedBucket, ...]
    step: DeviceStep

    def after(self, name: str) -> float:
        """Return the time from a device's last computation or transfer to its next step."""
        return after(self.devices[name].optimizer, self.cluster.devices[name], _total(self.buckets))

    def returned(self, name: str) -> float:
        """Return the part of `after` in which the device copies gradients out of buckets."""
        return _copied(self.cluster.devices[name], _total(self.buckets), slowed=True)


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
        compression: compression of each bucket; default: the cluster's.
        indices: parameters of each bucket; default: DDP's buckets.
        transfer: duration of each transfer in seconds, including coding; default: `travel`.
        later: computation delay per bucket in seconds; default: `beside_computing`.
    """
    cluster.check_names(schedules, "schedules")
    parameters = _same_parameters(schedules)
    if indices is None:
        indices = buckets_of(schedules, cluster)
    if compression is None:
        compression = [cluster.compression] * len(indices)
    if len(compression) != len(indices):
        message = f"compression of {len(compression)} buckets for {len(indices)}"
        raise ProfileError(message, where="compression", do="give one for each bucket, or None")
    buckets = tuple(map(partial(_bucket, parameters), indices, compression))
    used = travel(cluster, buckets) if transfer is None else np.array(transfer, dtype=float)
    if later is None:
        later = beside_computing(cluster, buckets, used)
    devices = {}
    for name, device in cluster.devices.items():
        earlier = [
            before_sending(device, item, bucket.nbytes)
            for item, bucket in zip(compression, buckets, strict=True)
        ]
        devices[name] = local(
            schedules[name],
            indices,
            slowdown=device.slowdown,
            launch=device.launch,
            extra=_entries(earlier),
            neighbours=_entries(later),
        )
    between = [
        after(devices[name].optimizer, device, _total(buckets))
        for name, device in cluster.devices.items()
    ]
    ready = np.stack([device.ready for device in devices.values()])
    computed = np.array([device.computed for device in devices.values()])
    step = steady(ready, computed, np.array(between), used)
    return SimulatedStep(cluster, devices, buckets, step)


def travel(cluster: Cluster, buckets: Sequence[SimulatedBucket]) -> Array:
    """Return the communication time of each bucket in seconds: transfer and coding."""
    used = np.zeros(len(buckets))
    plain = [index for index, bucket in enumerate(buckets) if bucket.coded is None]
    if plain:
        used[plain] = cluster.all_reduce.seconds(
            [buckets[index].travelling for index in plain], cluster.ranks
        )
    for index, coded, between, within in _links(cluster, buckets):
        used[index] = coded.with_travel(between, within)
    return used


def _links(
    cluster: Cluster, buckets: Sequence[SimulatedBucket]
) -> Iterator[tuple[int, CompressedTransfer, float, float]]:
    """Yield each encoded bucket with its transfer times between ranks or nodes, and within."""
    levels = None
    for index, bucket in enumerate(buckets):
        if (coded := bucket.coded) is None:
            continue
        levels = levels or cluster.exchange
        (within,) = levels.inside_seconds([coded.inside])
        (between,) = levels.across.seconds([bucket.travelling], levels.nodes, coded.phases)
        yield index, coded, float(between), float(within)


def sent(cluster: Cluster, bucket: SimulatedBucket) -> tuple[float, float]:
    """Return the bytes of a bucket that a node sends over its link, and a rank within its node.

    If classes have nodes of different sizes, the rank is of the largest one.
    """
    settings, nodes = bucket.coded, cluster.nodes
    size = max(device.node.ranks for device in cluster.devices.values())
    if settings is None and cluster.network is not None and cluster.network.ring:
        full = share(cluster.ranks) * bucket.travelling
        return full * (nodes > 1), full * (size > 1)
    inside = bucket.travelling
    if settings is not None:
        inside = settings.inside
    return share(nodes) * bucket.travelling, share(size) * inside


def buckets_of(schedules: Mapping[str, Schedule], cluster: Cluster) -> list[list[int]]:
    """Return the parameters of each bucket of DistributedDataParallel; empty for one device."""
    if cluster.ranks == 1:
        return []
    schedule = schedules[next(iter(cluster.devices))]
    numels = [parameter.numel for parameter in schedule.parameters]
    dtype_bytes = [parameter.dtype_bytes for parameter in schedule.parameters]
    limits = cluster.buckets.first_bytes, cluster.buckets.bytes
    return ddp_buckets(numels, dtype_bytes, arrival=arrival(schedule), limits=limits)


def after(optimizer: float, device: ClusterDevice, nbytes: int) -> float:
    """Return the time from the last computation and transfer to the end of the step, in seconds.

    It includes the copies of `nbytes` bytes of gradients out of the buckets.
    """
    return optimizer + device.delay + _copied(device, nbytes, slowed=True)


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
    times. `used` is the communication time of each bucket in seconds, including coding.
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
    for index, coded, between, within in _links(cluster, buckets):
        result[index] = network.busy * (between + within) + coding * coded.coding
    return result


def _copied(device: ClusterDevice, nbytes: int, slowed: bool = False) -> float:
    """Return the time to copy gradients in one direction, in seconds."""
    seconds = (device.copies or 0.0) * nbytes
    return seconds * device.slowdown if slowed else seconds


def _entries(seconds: Sequence[float]) -> dict[int, Entry]:
    return {index: Entry("", Part.OUTSIDE, item) for index, item in enumerate(seconds) if item}


def _total(buckets: Sequence[SimulatedBucket]) -> int:
    return sum(bucket.nbytes for bucket in buckets)


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
            pairs = zip_longest(schedule.parameters, other.parameters)
            differs = next(a or b for a, b in pairs if a != b)
            message = f"the devices {shown(first)} and {shown(name)} train different parameters: "
            do = "profile the same model on each class of devices"
            raise ProfileError(message + shown(differs.path), where="schedules", do=do)
    return schedule.parameters
