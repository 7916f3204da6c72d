"""A cluster: its classes of devices, the links between them, and what travels on these.

    [devices.v100]
    count = 16
    device = "v100"          # of the catalog; or profile = "v100.json"
    batch = 32               # samples of one device in a step

    [devices.t4]
    count = 16
    profile = "t4.json"
    batch = 32
    memory = 15.8e9          # bytes that a plan may take; or "16 GB", or "30%" of what the catalog says
    bandwidth = 1.25e9       # bytes a second of its link, where that is not the network's

    [network]
    bandwidth = 12.5e9
    latency = 30e-6

    [nodes]
    ranks = 8                # with one link between them and others
    bandwidth = 120e9        # bytes a second of each rank inside its node

Invariant: whoever wrote the file, what is read is a cluster that can be replayed, or an error says what is wrong, and where.

How much memory, as people write it: bytes, "4 GB", or "30%" of what a device has.

Invariant: what is understood is a number of bytes or a share above 0, finite, and nothing else is.

The parts of a cluster: classes of devices, links, nodes, buckets, and what is done to gradients.

Invariant: a part is a value, and `CHECKS` says of each what it may not be, whoever has written it: a file, or Python.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from qsync_fx.devices.device_catalog import check_exists, get, names
from qsync_fx.errors import DeviceError, ProfileError, nearest, shown
from qsync_fx.predictor.replayer.collectives import (
    AllReduce,
    CollectiveLink,
    Levels,
    MeasuredCollectives,
)
from qsync_fx.predictor.replayer.ddp_buckets import BUCKET_BYTES, FIRST_BYTES
from qsync_fx.predictor.replayer.device_timeline import Overlap
from qsync_fx.serialization.convert import Check
from qsync_fx.serialization.schema import Path, TomlSchema

Memory = float | int | str

_UNITS: Final = {
    "B": 1.0,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "KIB": 2.0**10,
    "MIB": 2.0**20,
    "GIB": 2.0**30,
}
WAYS: Final = 'give bytes, "4 GB" or "30%"'
"""What to do about one that is none."""


class Size(NamedTuple):
    """
    Attributes:
        amount: of bytes, or of the whole, 1 being all of it.
        share: which of the two.
    """

    amount: float
    share: bool = False


def memory_size(memory: Memory) -> Size | None:
    """Returns how much that is; None where it is no memory."""
    if not isinstance(memory, str):
        return Size(float(memory)) if memory > 0 and math.isfinite(memory) else None
    result = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|[KMG]?i?B)\s*", memory, flags=re.IGNORECASE)
    if (
        result is None
        or result[2].upper() == "IB"
        or not math.isfinite(float(result[1]))
        or not float(result[1])
    ):
        return None
    if result[2] == "%":
        return Size(float(result[1]) / 100, share=True)
    return Size(float(result[1]) * _UNITS[result[2].upper()])


@dataclass(frozen=True)
class ClusterDevice:
    """A class of devices that are alike.

    Attributes:
        count: how many there are.
        device: the name of a device of the catalog; None where a profile says how long things take.
        profile: path of a profile, from where the cluster's file lies.
        batch: samples of one device in a step; None where that is not known.
        memory: what a plan may take on it: bytes, "4 GB", or "30%" of what the device of the catalog has; None where that is not known.
        bandwidth, latency: of its link, or its node's; those of the network where None.
        slowdown: what it takes longer than its profile says: 1.1 for a tenth.
        delay: seconds that it waits for something else in each step, such as data.
        launch: seconds that the host takes to hand over one entry of its schedule.
        copies: seconds that DistributedDataParallel takes to copy a byte of gradients into its bucket, and again out of it; what the
            device's profile says of copying where None, and none where it says nothing.
    """

    count: int = 1
    device: str | None = None
    profile: str | None = None
    batch: int | None = None
    memory: float | str | None = None
    bandwidth: float | None = None
    latency: float | None = None
    slowdown: float = 1.0
    delay: float = 0.0
    launch: float = 0.0
    copies: float | None = None


@dataclass(frozen=True)
class Network:
    """
    Attributes:
        bandwidth: bytes a second of each node's link, which its ranks share; of each device's where it is a node of its own.
        latency: seconds of the smallest all-reduce; between nodes, where there are some.
        all_reduce: pairs of bytes and seconds that were measured, in place of the two.
        ranks: how many ranks took part in these; all devices of the cluster where None.
        busy: what of the time that a bucket travels alone a device computes later for it: 1 where the cores that compute send and sum,
            too, 0 where others do, and more where both slow one another down. As much is measured where all-reduces are.
        coding: the same of the time in which codecs write and read a bucket; where None as much as `busy`, up to all of it: cores that
            have to send have to code.
        slows_compute, slows_transfer: what computing takes longer while a bucket travels, and the reverse; 0.1 for a tenth.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    all_reduce: list[tuple[float, float]] = field(default_factory=list)
    ranks: int | None = None
    busy: float = 0.0
    coding: float | None = None
    slows_compute: float = 0.0
    slows_transfer: float = 0.0


@dataclass(frozen=True)
class NodeGroup:
    """What shares a node: ranks of one class, with fast links between them and one link to all others.

    Attributes:
        ranks: of each node. With one, devices are linked by the network alone.
        bandwidth: bytes a second that each of them sends inside the node; needed where there are several, or `inside`.
        latency: seconds of the smallest all-reduce inside a node.
        ring: whether DistributedDataParallel's all-reduce is one ring through all ranks, as gloo's. Else it goes in two levels.
        inside: pairs of bytes and seconds of all-reduces inside a node that were measured, in place of bandwidth and latency.
        across: the same of all-reduces between nodes, of the bytes that the ranks of a node give together, each its part, all parts at
            once; in place of the network's for what is coded, so that its own table is of all ranks alone.
        count: how many nodes took part in these; all of the cluster where None.
    """

    ranks: int = 1
    bandwidth: float | None = None
    latency: float = 0.0
    ring: bool = False
    inside: list[tuple[float, float]] = field(default_factory=list)
    across: list[tuple[float, float]] = field(default_factory=list)
    count: int | None = None


@dataclass(frozen=True)
class Buckets:
    """
    Attributes:
        first_bytes: at which the first bucket is full.
        bytes: at which further ones are.
        whole_graphs: whether gradients of a compiled graph come out together, as with torch._dynamo.config.optimize_ddp = False. Else
            DistributedDataParallel has graphs split where buckets end, so that each is sent when its last gradient is whole.
    """

    first_bytes: int = FIRST_BYTES
    bytes: int = BUCKET_BYTES
    whole_graphs: bool = False


@dataclass(frozen=True)
class Compression:
    """What is done to gradients before they travel.

    Attributes:
        ratio: bytes that travel for each byte of a gradient.
        fixed: seconds of each bucket on each device, between its last gradient and its sending.
        each: the same for each byte of gradients.
    """

    ratio: float = 1.0
    fixed: float = 0.0
    each: float = 0.0


_ZERO_IS_FINE: Final = (
    "latency",
    "delay",
    "launch",
    "busy",
    "coding",
    "slows_compute",
    "slows_transfer",
    "fixed",
    "each",
    "copies",
)


def _positive(value: Any) -> str | None:
    """Returns which number of a value cannot be, None where all can."""
    for part in fields(value):
        number = getattr(value, part.name)
        if type(number) in (int, float) and (
            not number >= 0 or (number == 0 and part.name not in _ZERO_IS_FINE)
        ):
            least = "at least" if part.name in _ZERO_IS_FINE else "above"
            return f" has the {part.name} {number}, which must be {least} 0"
    return None


def _device(device: ClusterDevice) -> str | None:
    if device.device is not None and device.profile is not None:
        return " has both a device of the catalog and a profile"
    if isinstance(device.memory, str) and memory_size(device.memory) is None:
        return f" has the memory {shown(device.memory)}, which is none; {WAYS}"
    return _positive(device)


def _table(name: str, points: list[tuple[float, float]]) -> str | None:
    if any(number <= 0 for point in points for number in point):
        return f" has a point in {name} that is not above 0"
    if len({nbytes for nbytes, _ in points}) != len(points):
        return f" has two points of the same bytes in {name}"
    return None


def _network(network: Network) -> str | None:
    if wrong := _table("all_reduce", network.all_reduce):
        return wrong
    if network.all_reduce and network.bandwidth is not None:
        return " has both a bandwidth and all_reduce"
    if network.ranks is not None and network.ranks < 2:
        return " has an all_reduce of fewer than 2 ranks"
    return _positive(network)


def _nodes(nodes: NodeGroup) -> str | None:
    if wrong := _table("inside", nodes.inside) or _table("across", nodes.across):
        return wrong
    if nodes.inside and nodes.bandwidth is not None:
        return " has both a bandwidth and a table of what is inside nodes"
    if nodes.ranks > 1 and nodes.bandwidth is None and not nodes.inside:
        return f" has nodes of {nodes.ranks} ranks, and does not say how fast the links inside are (bandwidth)"
    if nodes.count is not None and nodes.count < 2:
        return " has a table of what goes across fewer than 2 nodes"
    return _positive(nodes)


CHECKS: Final[Mapping[Any, Check]] = {
    ClusterDevice: _device,
    Network: _network,
    NodeGroup: _nodes,
    Buckets: _positive,
    Compression: _positive,
}


@dataclass(frozen=True)
class Cluster:
    """
    Attributes:
        devices: classes of devices by name. The first one holds rank 0, whose gradients' order is that of the buckets.
        network: what gradients travel on; None for one device alone.
        buckets: how gradients are put together.
        compression: what is done to them first; None for nothing.
        nodes: how many ranks share one.
    """

    devices: Mapping[str, ClusterDevice]
    network: Network | None = None
    buckets: Buckets = field(default_factory=Buckets)
    compression: Compression | None = None
    nodes: NodeGroup = field(default_factory=NodeGroup)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProfileError("the cluster has no devices", do=_REMEDY)
        # Files are checked part by part while they are read, which says the place; from Python come others as wrong.
        parts: dict[str, Any] = {f"devices.{name}": device for name, device in self.devices.items()}
        parts |= {"network": self.network, "buckets": self.buckets, "compression": self.compression}
        parts["nodes"] = self.nodes
        for where, part in parts.items():
            if part is not None and (why := CHECKS[type(part)](part)):
                raise ProfileError(f"the cluster{why}", where=where, do=_REMEDY)
        if why := self._uneven():
            raise ProfileError(f"the cluster{why}", where="nodes", do=_REMEDY)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Return the cluster in a file of TOML.

        Raises:
            ProfileError: the file cannot be read, is not a cluster, or names a device that does not exist.
        """
        result = CLUSTER.load(path)
        for name, device in result.devices.items():
            if device.device is not None:
                _check_device(path, name, device.device)
        folder = pathlib.Path(os.fspath(path)).parent
        return replace(
            result,
            devices={name: _beside(folder, device) for name, device in result.devices.items()},
        )

    @property
    def ranks(self) -> int:
        """How many devices there are."""
        return sum(device.count for device in self.devices.values())

    def bytes_of(self, name: str, memory: Memory) -> float | None:
        """Returns how many bytes some memory of a class of devices is: a share is one of what the cluster says that they have, or the
        catalog; None where neither does, and for what is no memory."""
        size = memory_size(memory)
        if size is None or not size.share:
            return None if size is None else size.amount
        device = self.devices[name]
        available = memory_size(device.memory or 0)
        if available is not None and not available.share:
            return available.amount * size.amount
        called = device.device or name
        return (
            get(called).memory.bytes * size.amount if device.device or called in names() else None
        )

    @property
    def all_reduce(self) -> AllReduce:
        """How long it takes DistributedDataParallel to send a bucket: what was measured, or the ring over all links, or two levels.

        Raises:
            ProfileError: how fast links are is not known.
        """
        nodes = self.nodes
        if (measured := self._measured()) is not None:
            return measured
        if nodes.ranks == 1:
            return self._link()
        if not nodes.ring:
            return self.exchange
        if self.ranks == nodes.ranks:
            return self.exchange.inside
        across = self._link()
        # One rank of each node sends to the next node, so that the node's link carries what every link of the ring does.
        return CollectiveLink(
            min(across.bandwidth, nodes.bandwidth or across.bandwidth), across.latency
        )

    @property
    def exchange(self) -> Levels:
        """How long it takes to send a bucket that is coded: between nodes in a codec, and inside them in FP32.

        Raises:
            ProfileError: how fast links are is not known.
        """
        nodes = self.nodes
        inside: AllReduce = CollectiveLink(nodes.bandwidth or math.inf, nodes.latency)
        if nodes.inside:
            inside = MeasuredCollectives(tuple(nodes.inside), nodes.ranks)
        if nodes.across:
            return Levels(
                MeasuredCollectives(tuple(nodes.across), nodes.count or self.ranks // nodes.ranks),
                inside,
                nodes.ranks,
            )
        return Levels(self._measured() or self._link(), inside, nodes.ranks)

    def _measured(self) -> MeasuredCollectives | None:
        """How long an all-reduce of all ranks took, where that was measured."""
        network = self.network or Network()
        return (
            MeasuredCollectives(tuple(network.all_reduce), network.ranks or self.ranks)
            if network.all_reduce
            else None
        )

    def _link(self) -> CollectiveLink:
        network = self.network or Network()
        bandwidths = []
        for name, device in self.devices.items():
            if (bandwidth := device.bandwidth or network.bandwidth) is None:
                message = f"the cluster says of the link of {shown(name)} no bandwidth, and has no [network] with one"
                raise ProfileError(message, do=_REMEDY)
            bandwidths.append(bandwidth)
        latencies = [
            network.latency if item.latency is None else item.latency
            for item in self.devices.values()
        ]
        return CollectiveLink(min(bandwidths), max(latencies))

    def _uneven(self) -> str | None:
        """Returns why nodes do not go with devices and links, None where they do."""
        size = self.nodes.ranks
        if self.nodes.across:
            # What was measured is of nodes as they are, whatever devices share one.
            full = self.ranks % size == 0
            return None if full else f" has {self.ranks} devices, which do not make nodes of {size}"
        for name, device in self.devices.items():
            if device.count % size:
                return (
                    f" has {device.count} devices {shown(name)}, which do not make nodes of {size}"
                )
        if 1 < size < self.ranks and self.network is not None and self.network.all_reduce:
            return (
                " has an all_reduce that was measured, which does not tell what of it is inside nodes; say a bandwidth, or what was "
                "measured inside and across nodes"
            )
        return None

    @property
    def overlap(self) -> Overlap:
        """How communication and computation slow one another down."""
        network = self.network or Network()
        return Overlap(network.slows_compute, network.slows_transfer)

    def check_names(self, names: Mapping[str, object], of: str) -> None:
        """Raises `ProfileError` where something is given for other classes of devices than there are."""
        if unknown := [name for name in names if name not in self.devices]:
            message = f"the cluster has no devices {shown(unknown[0])}"
            raise ProfileError(message, where=of, do=nearest(unknown[0][:40], self.devices))
        if missing := [name for name in self.devices if name not in names]:
            raise ProfileError(
                f"there is none for the devices {shown(missing[0])}",
                where=of,
                do="give one for each class",
            )


_REMEDY: Final = "see the example in docs/predictor.md"


def _check_device(path: Path, name: str, device: str) -> None:
    try:
        check_exists(device)
    except DeviceError as error:
        raise ProfileError(
            error.what, where=f"{shown(str(path))}, devices.{name}.device", do=error.do
        ) from error


def _beside(folder: pathlib.Path, device: ClusterDevice) -> ClusterDevice:
    return (
        device if device.profile is None else replace(device, profile=str(folder / device.profile))
    )


CLUSTER: Final = TomlSchema(
    Cluster,
    noun="cluster",
    error=ProfileError,
    remedy=_REMEDY,
    name=None,
    largest=2**20,
    checks=CHECKS,
)
