"""A cluster: its classes of devices, the links between them, and what travels on these.

    [devices.v100]
    count = 16
    device = "v100"          # of the catalog; or profile = "v100.json"
    batch = 32               # samples of one device in a step

    [devices.t4]
    count = 16
    profile = "t4.json"
    batch = 32
    memory = 15.8e9          # bytes that a plan may take
    bandwidth = 1.25e9       # bytes a second of its link, where that is not the network's

    [network]
    bandwidth = 12.5e9
    latency = 30e-6

    [nodes]
    ranks = 8                # with one link between them and others
    bandwidth = 120e9        # bytes a second of each rank inside its node

Invariant: whoever wrote the file, what is read is a cluster that can be replayed, or an error says what is wrong, and where.
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from qsync_fx.codec import Check, Path
from qsync_fx.codec.toml import TomlSchema
from qsync_fx.errors import ProfileError, nearest, shown
from qsync_fx.predictor.replay.buckets import BUCKET_BYTES, FIRST_BYTES
from qsync_fx.predictor.replay.collectives import AllReduce, Levels, Link, Measured
from qsync_fx.predictor.replay.step import Overlap


@dataclass(frozen=True)
class Device:
    """A class of devices that are alike.

    Attributes:
        count: how many there are.
        device: the name of a device of the catalog; None where a profile says how long things take.
        profile: path of a profile, from where the cluster's file lies.
        batch: samples of one device in a step; None where that is not known.
        memory: bytes that a plan may take on it; None where that is not known.
        bandwidth, latency: of its link, or its node's; those of the network where None.
        slowdown: what it takes longer than its profile says: 1.1 for a tenth.
        delay: seconds that it waits for something else in each step, such as data.
        launch: seconds that the host takes to hand over one entry of its schedule.
    """

    count: int = 1
    device: str | None = None
    profile: str | None = None
    batch: int | None = None
    memory: float | None = None
    bandwidth: float | None = None
    latency: float | None = None
    slowdown: float = 1.0
    delay: float = 0.0
    launch: float = 0.0


@dataclass(frozen=True)
class Network:
    """
    Attributes:
        bandwidth: bytes a second of each node's link, which its ranks share; of each device's where it is a node of its own.
        latency: seconds of the smallest all-reduce; between nodes, where there are some.
        all_reduce: pairs of bytes and seconds that were measured, in place of the two.
        ranks: how many ranks took part in these; all devices of the cluster where None.
        slows_compute, slows_transfer: what computing takes longer while a bucket travels, and the reverse; 0.1 for a tenth.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    all_reduce: list[tuple[float, float]] = field(default_factory=list)
    ranks: int | None = None
    slows_compute: float = 0.0
    slows_transfer: float = 0.0


@dataclass(frozen=True)
class Nodes:
    """What shares a node: ranks of one class, with fast links between them and one link to all others.

    Attributes:
        ranks: of each node. With one, devices are linked by the network alone.
        bandwidth: bytes a second that each of them sends inside the node; needed where there are several.
        latency: seconds of the smallest all-reduce inside a node.
        ring: whether DistributedDataParallel's all-reduce is one ring through all ranks, as gloo's. Else it goes in two levels.
    """

    ranks: int = 1
    bandwidth: float | None = None
    latency: float = 0.0
    ring: bool = False


@dataclass(frozen=True)
class Buckets:
    """
    Attributes:
        first_bytes: at which the first bucket is full.
        bytes: at which further ones are.
        whole_graphs: whether gradients of a compiled graph come out together, as those of DDP(torch.compile(model)) do.
            torch.compile(DDP(model)) splits graphs where buckets end, so that each is sent when its last gradient is whole.
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

    devices: Mapping[str, Device]
    network: Network | None = None
    buckets: Buckets = Buckets()
    compression: Compression | None = None
    nodes: Nodes = Nodes()

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProfileError("the cluster has no devices", do=_REMEDY)
        # Files are checked part by part while they are read, which says the place; from Python come others as wrong.
        parts: dict[str, Any] = {f"devices.{name}": device for name, device in self.devices.items()}
        parts |= {"network": self.network, "buckets": self.buckets, "compression": self.compression}
        parts["nodes"] = self.nodes
        for where, part in parts.items():
            if part is not None and (why := _CHECKS[type(part)](part)):
                raise ProfileError(f"the cluster{why}", where=where, do=_REMEDY)
        if why := self._uneven():
            raise ProfileError(f"the cluster{why}", where="nodes", do=_REMEDY)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Reads a file of TOML, which anyone may have written; raises `ProfileError` saying what is wrong with it, and where."""
        found = CLUSTER.load(path)
        folder = pathlib.Path(os.fspath(path)).parent
        return replace(found, devices={name: _beside(folder, device) for name, device in found.devices.items()})

    @property
    def ranks(self) -> int:
        """How many devices there are."""
        return sum(device.count for device in self.devices.values())

    @property
    def all_reduce(self) -> AllReduce:
        """How long it takes DistributedDataParallel to send a bucket: what was measured, or the ring over all links, or two levels.

        Raises:
            ProfileError: how fast links are is not known.
        """
        across, nodes = self._across(), self.nodes
        if nodes.ranks == 1 or isinstance(across, Measured):
            return across
        if not nodes.ring:
            return self.exchange
        if self.ranks == nodes.ranks:
            return self.exchange.inside
        # One rank of each node sends to the next node, so that the node's link carries what every link of the ring does.
        return Link(min(across.bandwidth, nodes.bandwidth or across.bandwidth), across.latency)

    @property
    def exchange(self) -> Levels:
        """How long it takes to send a bucket that is coded: between nodes in a codec, and inside them in FP32.

        Raises:
            ProfileError: how fast links are is not known.
        """
        nodes = self.nodes
        return Levels(self._across(), Link(nodes.bandwidth or math.inf, nodes.latency), nodes.ranks)

    def _across(self) -> Link | Measured:
        network = self.network or Network()
        if network.all_reduce:
            return Measured(tuple(network.all_reduce), network.ranks or self.ranks)
        bandwidths = []
        for name, device in self.devices.items():
            if (bandwidth := device.bandwidth or network.bandwidth) is None:
                what = f"the cluster says of the link of {shown(name)} no bandwidth, and has no [network] with one"
                raise ProfileError(what, do=_REMEDY)
            bandwidths.append(bandwidth)
        latencies = [network.latency if one.latency is None else one.latency for one in self.devices.values()]
        return Link(min(bandwidths), max(latencies))

    def _uneven(self) -> str | None:
        """Returns why nodes do not go with devices and links, None where they do."""
        size = self.nodes.ranks
        for name, device in self.devices.items():
            if device.count % size:
                return f" has {device.count} devices {shown(name)}, which do not make nodes of {size}"
        if size > 1 and self.network is not None and self.network.all_reduce:
            return (
                " has an all_reduce that was measured, which does not tell what of it is inside nodes; say a bandwidth"
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
            what = f"the cluster has no devices {shown(unknown[0])}"
            raise ProfileError(what, where=of, do=nearest(unknown[0][:40], self.devices))
        if missing := [name for name in self.devices if name not in names]:
            raise ProfileError(
                f"there is none for the devices {shown(missing[0])}", where=of, do="give one for each class"
            )


_REMEDY: Final = "see the example in docs/predictor.md"
_ZERO_IS_FINE: Final = ("latency", "delay", "launch", "slows_compute", "slows_transfer", "fixed", "each")


def _positive(value: Any) -> str | None:
    """Returns which number of a value cannot be, None where all can."""
    for part in fields(value):
        number = getattr(value, part.name)
        if type(number) in (int, float) and (not number >= 0 or (number == 0 and part.name not in _ZERO_IS_FINE)):
            least = "at least" if part.name in _ZERO_IS_FINE else "above"
            return f" has the {part.name} {number}, which must be {least} 0"
    return None


def _device(device: Device) -> str | None:
    if device.device is not None and device.profile is not None:
        return " has both a device of the catalog and a profile"
    return _positive(device)


def _network(network: Network) -> str | None:
    if any(number <= 0 for point in network.all_reduce for number in point):
        return " has a point in all_reduce that is not above 0"
    if len({nbytes for nbytes, _ in network.all_reduce}) != len(network.all_reduce):
        return " has two points of the same bytes in all_reduce"
    if network.all_reduce and network.bandwidth is not None:
        return " has both a bandwidth and all_reduce"
    if network.ranks is not None and network.ranks < 2:
        return " has an all_reduce of fewer than 2 ranks"
    return _positive(network)


def _nodes(nodes: Nodes) -> str | None:
    if nodes.ranks > 1 and nodes.bandwidth is None:
        return f" has nodes of {nodes.ranks} ranks, and does not say how fast the links inside are (bandwidth)"
    return _positive(nodes)


def _beside(folder: pathlib.Path, device: Device) -> Device:
    return device if device.profile is None else replace(device, profile=str(folder / device.profile))


_CHECKS: Final[Mapping[Any, Check]] = {
    Device: _device,
    Network: _network,
    Nodes: _nodes,
    Buckets: _positive,
    Compression: _positive,
}

CLUSTER: Final = TomlSchema(
    Cluster,
    noun="cluster",
    error=ProfileError,
    remedy=_REMEDY,
    name=None,
    largest=2**20,
    checks=_CHECKS,
)
