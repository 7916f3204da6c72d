"""A step of a fleet, from a schedule a class of devices.

Invariant: what travels is one list of buckets for all devices, in the order in which gradients are whole on the first class, as DDP takes
it from rank 0. Devices of a class are alike, so that one of them stands for all.

The seconds of a step while a plan is searched: one operator changes, and the answer is there in microseconds.

Invariant: after any sequence of changes the seconds are those that `closed_form.iteration` gives for the new times, up to rounding. A
change is undone by the opposite one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.errors import ProfileError, shown
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Compression
from qsync_fx.predictor.replayer.collectives import share
from qsync_fx.predictor.replayer.ddp_buckets import ddp_buckets
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
    """A bucket that a codec writes, on the thread that communicates, while the device computes on. A large one goes in stretches: one
    travels while the next is coded. Where several ranks share a node that is so between nodes; what is inside comes before and behind it,
    whole: values are copied, then sent, then summed. Nothing of one bucket goes beside another.

    Attributes:
        codec: what it is called.
        nbytes: that a rank, or the ranks of a node together, give in place of gradients: an all-reduce of so many sends as many bytes.
        seconds: of coding and decoding what goes between ranks, or nodes.
        phases: in which they are exchanged.
        inside: bytes that a rank gives inside its node, where several share one.
        stretches: in which it goes in each phase; 1 where nothing travels while it is coded.
        inside_seconds: of copying and summing what goes inside the node, in FP32.
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
        """Seconds that the thread that communicates does not wait for a link."""
        return self.seconds + self.inside_seconds

    def with_travel(self, seconds: float, inside: float = 0.0) -> float:
        """Returns how long it all takes with so many seconds of travelling between ranks, or nodes, and inside these: of coding and
        travelling the longer, and of the other a stretch; and what is inside, one after the other."""
        between = max(seconds, self.seconds) + min(seconds, self.seconds) / self.stretches
        return between + inside + self.inside_seconds


@dataclass(frozen=True)
class SimulatedBucket:
    """Gradients that travel together.

    Attributes:
        parameters: whose.
        nbytes: of the gradients.
        travelling: bytes that travel.
        coded: what writes them; None where DistributedDataParallel sends them itself.
    """

    parameters: tuple[str, ...]
    nbytes: int
    travelling: float
    coded: CompressedTransfer | None = None


@dataclass(frozen=True)
class SimulatedStep:
    """A step of a fleet.

    Attributes:
        cluster: whose.
        devices: by name, what one of each class does when it is alone.
        buckets: what travels, in order; nothing where there is one device.
        step: when all of that happens; its axis of devices has the order of `devices`.
    """

    cluster: Cluster
    devices: Mapping[str, Local]
    buckets: tuple[SimulatedBucket, ...]
    step: DeviceStep

    def after(self, name: str) -> float:
        """Returns the seconds from when all of a device is computed and has arrived to the end of its step."""
        return after(self.devices[name].optimizer, self.cluster.devices[name], _whole(self.buckets))

    def returned(self, name: str) -> float:
        """Returns the seconds of that in which the device copies gradients out of their buckets."""
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
    """Returns a steady step of a fleet.

    Args:
        schedules: by class of devices.
        cluster: what devices and links there are.
        compression: for each bucket what is done to it; that of the cluster for all where None.
        indices: parameters of each bucket; those that DDP takes where None.
        transfer: seconds that each bucket travels, coding included; `travel` where None.
        later: seconds that each device computes later for each bucket; `beside_computing` where None.

    Raises:
        ProfileError: schedules of different models, of classes that the cluster has not, or none for one that it has.
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
    neighbours = _entries(
        dict(enumerate(beside_computing(cluster, buckets, used) if later is None else later))
    )
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
    """Returns the seconds that communication spends on each bucket: what the cluster's links make of its bytes, and coding."""
    used = np.zeros(len(buckets))
    plain = [index for index, bucket in enumerate(buckets) if bucket.coded is None]
    if plain:
        used[plain] = cluster.all_reduce.seconds(
            [buckets[index].travelling for index in plain], cluster.ranks
        )
    for index, seconds in _links(cluster, buckets).items():
        settings = buckets[index].coded
        assert settings is not None, "only what is coded is in it"
        used[index] = settings.with_travel(*seconds)
    return used


def _links(cluster: Cluster, buckets: Sequence[SimulatedBucket]) -> dict[int, tuple[float, float]]:
    """Returns the seconds that what a codec makes of a bucket travels between ranks, or nodes, and inside these, of each that is coded."""
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
    """Returns the bytes of a bucket that a node sends over its link, and those that a rank sends inside its node."""
    size, settings = cluster.nodes.ranks, bucket.coded
    if settings is None and cluster.nodes.ring:
        full = share(cluster.ranks) * bucket.travelling
        return full if size < cluster.ranks else 0.0, full if size > 1 else 0.0
    inside = bucket.travelling if settings is None else settings.inside
    return share(cluster.ranks // size) * bucket.travelling, share(size) * inside


def buckets_of(schedules: Mapping[str, Schedule], cluster: Cluster) -> list[list[int]]:
    """Returns the parameters of each bucket of DistributedDataParallel; nothing where there is one device."""
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
    """Returns the seconds from when all is computed and has arrived to the end of a step: so many bytes are copied out of their buckets."""
    return optimizer + device.delay + returned(device, nbytes)


def returned(device: ClusterDevice, nbytes: int) -> float:
    """Returns the seconds in which a device copies so many bytes of gradients out of their buckets."""
    return _copied(device, nbytes) * device.slowdown


def before_sending(
    device: ClusterDevice, settings: Compression | CompressedTransfer | None, nbytes: int
) -> float:
    """Returns the seconds that a device spends on a bucket before it is sent, where it is as fast as its profile says."""
    compressing = (
        settings.fixed + settings.each * nbytes if isinstance(settings, Compression) else 0.0
    )
    return compressing + _copied(device, nbytes)


def beside_computing(
    cluster: Cluster, buckets: Sequence[SimulatedBucket], used: Sequence[float] | Array
) -> list[float]:
    """Returns the seconds that each device, as fast as its profile says, computes later for each bucket: of those that it travels what
    sending keeps a core for, and of those in which it is coded what that does, which goes on while another part of it travels.

    Args:
        taken: seconds of each bucket, coding included.
    """
    network = cluster.network
    if network is None:
        return [0.0] * len(buckets)
    coding = min(1.0, network.busy) if network.coding is None else network.coding
    # Seconds of coding are those of the slowest devices, and each is slowed down again as a device.
    coding /= max(device.slowdown for device in cluster.devices.values())

    links = _links(cluster, buckets)
    travelling = [
        sum(links[index]) if index in links else float(seconds)
        for index, seconds in enumerate(used)
    ]
    coded = [0.0 if bucket.coded is None else bucket.coded.coding for bucket in buckets]
    return [
        network.busy * sent + coding * owned for sent, owned in zip(travelling, coded, strict=True)
    ]


def _copied(device: ClusterDevice, nbytes: int) -> float:
    """Returns the seconds of a copy, one way, where the device is as fast as its profile says."""
    return (device.copies or 0.0) * nbytes


def _sending(
    device: ClusterDevice,
    settings: Sequence[Compression | CompressedTransfer | None],
    buckets: Sequence[SimulatedBucket],
) -> dict[int, Entry]:
    """Returns by bucket what the device does to send it."""
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
    return SimulatedBucket(paths, nbytes, nbytes * (1.0 if settings is None else settings.ratio))


def _same_parameters(schedules: Mapping[str, Schedule]) -> tuple[Parameter, ...]:
    """Returns the parameters that all schedules have."""
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
                f"the devices {shown(first)} and {shown(name)} train different parameters: {shown(differs)}",
                where="schedules",
                do="profile the same model on each class of devices",
            )
    return schedule.parameters


class Incremental:
    """The steps of a run whose devices' entries change one at a time.

    Args:
        seconds: (devices, entries), what each entry takes.
        done_after: for each bucket, how many entries are done once it is ready; never falling.
        transfer: (buckets,), seconds that each travels.
        optimizer: (devices,), seconds between the last bucket and the next step.
    """

    def __init__(
        self, seconds: Array, done_after: Sequence[int], transfer: Array, optimizer: Array
    ) -> None:
        rest = np.cumsum(transfer[::-1])[::-1]
        counts = np.asarray(done_after, dtype=int)
        ready = whole(seconds, counts)
        # The end of the backward pass is one more thing to wait for, with nothing to send.
        self._late = (
            np.concatenate([ready + rest, seconds.sum(axis=-1, keepdims=True)], axis=-1)
            + optimizer[:, None]
        )
        self._first = np.searchsorted(counts, np.arange(seconds.shape[-1]), side="right").tolist()
        self._latest = self._late.max(axis=-1)
        self._device, self._others = -1, -np.inf

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return float(self._latest.max())

    def changed(self, device: int, entry: int, by: float) -> float:
        """Lets an entry of a device take longer, or shorter, and returns the seconds of a step."""
        late = self._late[device]
        late[self._first[entry] :] += by
        owned = self._latest[device] = np.maximum.reduce(late)
        if device != self._device:
            # A search stays with a device for long, and there may be thousands of others.
            others = np.delete(self._latest, device)
            self._device, self._others = device, others.max(initial=-np.inf)
        return float(max(owned, self._others))


def whole(seconds: Array, done_after: Sequence[int] | Array) -> Array:
    """Returns (..., buckets): the seconds of the entries that are done once each bucket is ready.

    Args:
        seconds: (..., entries). Of thousands of devices half as fast again in single precision.
        done_after: for each bucket, how many entries those are; never falling.
    """
    edges, index = np.unique(np.concatenate([[0], done_after]), return_inverse=True)
    total = np.zeros((*seconds.shape[:-1], len(edges)))
    if len(edges) > 1:
        # reduceat sums from each edge to the next one, and the last of them to the end.
        parts = np.add.reduceat(seconds[..., : edges[-1]], edges[:-1], axis=-1)
        np.cumsum(parts, axis=-1, dtype=np.float64, out=total[..., 1:])
    return total[..., index[1:]]
