"""Clusters: device classes, links between devices, and settings of the gradient exchange.

docs/replayer.md has an example of the TOML file. Every `Cluster` can be replayed: invalid values
from a file or from Python raise an error with the cause and the location.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from qsync_fx.devices.device_catalog import canonical, check_exists, get
from qsync_fx.errors import DeviceError, ProfileError, nearest, shown
from qsync_fx.predictor.replayer.collectives import (
    BUCKET_BYTES,
    FIRST_BYTES,
    AllReduce,
    CollectiveLink,
    Levels,
    MeasuredCollectives,
)
from qsync_fx.serialization.schema import Check, Path, TomlSchema

Memory = float | int | str

_UNITS: Final = {"%": 0.01, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9} | {
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30
}  # fmt: skip
WAYS: Final = 'give bytes, "4 GB" or "30%"'


class Size(NamedTuple):
    """Amount of memory: bytes, or a share of the total memory, 1 for all of it."""

    amount: float
    share: bool = False


def memory_size(memory: Memory) -> Size | None:
    """Return the parsed amount of memory; None if it is invalid."""
    amount, unit = memory, "B"
    if isinstance(memory, str):
        result = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|(?:[KMG]i?)?B)\s*", memory, re.IGNORECASE)
        if result is None:
            return None
        amount, unit = result[1], result[2].upper()
    size = Size(float(amount) * _UNITS[unit], share=unit == "%")
    return size if 0 < size.amount < math.inf else None


@dataclass(frozen=True)
class ClusterDevice:
    """Class of equal devices.

    Attributes:
        device: name of a device of the catalog; None if a profile supplies the times.
        profile: path of a profile, relative to the folder of the cluster file.
        memory: memory available to a plan: bytes, "4 GB", or "30%" of the catalog device's memory.
        bandwidth, latency: of its link, or of its node's link; None for the network's values.
        slowdown: factor on the durations of its profile.
        delay: seconds per step that it waits for other causes, such as data loading.
        launch: seconds that the host needs to launch one entry of its schedule.
        copies: seconds per byte that DistributedDataParallel needs to copy gradients into a bucket,
            and again to copy them back; None for the value of the device's profile.
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
    """Network between nodes, or between devices if each one is a node.

    Attributes:
        bandwidth: bytes per second of each node's link, which its ranks share.
        latency: seconds of the smallest all-reduce (between nodes, if there are nodes).
        all_reduce: measured pairs of bytes and seconds, which replace bandwidth and latency.
        ranks: number of ranks in these measurements; None for all devices of the cluster.
        busy: computation delay per second of transfer of a bucket that travels alone: 0 if other
            cores send and sum, 1 if the computing cores do, more if both slow each other down.
        coding: computation delay per second in which codecs encode and decode; None for the value
            of `busy`, at most 1.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    all_reduce: list[tuple[float, float]] = field(default_factory=list)
    ranks: int | None = None
    busy: float = 0.0
    coding: float | None = None


@dataclass(frozen=True)
class NodeGroup:
    """Nodes: groups of ranks of one class with fast links inside and one shared link to others.

    Attributes:
        ranks: ranks per node. With 1, only the network links devices.
        bandwidth: bytes per second that each rank sends within the node, unless `inside` is given.
        latency: seconds of the smallest all-reduce within a node.
        ring: whether DistributedDataParallel's all-reduce is one ring through all ranks, as with
            gloo; otherwise it is hierarchical.
        inside: measured pairs of bytes and seconds of all-reduces within a node, which replace
            bandwidth and latency.
        across: measured pairs for all-reduces between nodes, by the total bytes of a node. For
            compressed buckets they replace the network's measurements.
        count: number of nodes in the `across` measurements; None for all nodes of the cluster.
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
    """Settings of DistributedDataParallel's gradient buckets.

    Attributes:
        first_bytes, bytes: size at which the first and further buckets are full.
        whole_graphs: whether all gradients of a compiled graph become ready together, as with
            torch._dynamo.config.optimize_ddp = False.
    """

    first_bytes: int = FIRST_BYTES
    bytes: int = BUCKET_BYTES
    whole_graphs: bool = False


@dataclass(frozen=True)
class Compression:
    """Compression of gradients before the transfer.

    Attributes:
        ratio: transferred bytes per byte of a gradient.
        fixed, each: seconds of each device per bucket and per byte of gradients.
    """

    ratio: float = 1.0
    fixed: float = 0.0
    each: float = 0.0


_ZERO_IS_FINE: Final = frozenset("latency delay launch busy coding fixed each copies".split())


def _positive(value: Any) -> str | None:
    """Return a message for an invalid number among the fields of a value; None if all are valid."""
    for name, number in vars(value).items():
        if type(number) not in (int, float):
            continue
        if name in _ZERO_IS_FINE and not number >= 0:
            return f" has the {name} {number}, which must be at least 0"
        if name not in _ZERO_IS_FINE and not number > 0:
            return f" has the {name} {number}, which must be above 0"
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
        return " has both a bandwidth and a table of all-reduces inside nodes"
    if nodes.ranks > 1 and nodes.bandwidth is None and not nodes.inside:
        return f" has nodes of {nodes.ranks} ranks without a bandwidth of the links inside"
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
    """Cluster of devices for data-parallel training.

    Attributes:
        devices: device classes by name. The first class contains rank 0, whose gradient order
            determines the buckets.
        network: links for gradients; None for a single device.
        compression: compression of all buckets.
    """

    devices: Mapping[str, ClusterDevice]
    network: Network | None = None
    buckets: Buckets = field(default_factory=Buckets)
    compression: Compression | None = None
    nodes: NodeGroup = field(default_factory=NodeGroup)

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProfileError("the cluster has no devices", do=_REMEDY)
        # The schema checks files and knows the location. This check is for Python callers.
        parts = {f"devices.{name}": device for name, device in self.devices.items()} | vars(self)
        for where, part in parts.items():
            if type(part) in CHECKS and (why := CHECKS[type(part)](part)):
                raise ProfileError(f"the cluster{why}", where=where, do=_REMEDY)
        if why := self._uneven():
            raise ProfileError(f"the cluster{why}", where="nodes", do=_REMEDY)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Return the cluster in a TOML file; raise `ProfileError` if it is invalid."""
        result = CLUSTER.load(path)
        devices = dict(result.devices)
        for name, device in result.devices.items():
            if device.device is not None:
                try:
                    check_exists(device.device)
                except DeviceError as error:
                    where = f"{shown(str(path))}, devices.{name}.device"
                    raise ProfileError(error.what, where=where, do=error.do) from error
            if device.profile is not None:
                profile = pathlib.Path(os.fspath(path)).parent / device.profile
                devices[name] = replace(device, profile=str(profile))
        return replace(result, devices=devices)

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return sum(device.count for device in self.devices.values())

    @property
    def samples(self) -> int | None:
        """Samples of a step; None if the batch of a device is unknown."""
        batches = [item.batch * item.count for item in self.devices.values() if item.batch]
        return sum(batches) if len(batches) == len(self.devices) else None

    def bytes_of(self, name: str, memory: Memory) -> float | None:
        """Return an amount of memory of a device class in bytes; None if unknown or invalid.

        A share refers to the memory in the cluster, else to the memory in the catalog.
        """
        size, device = memory_size(memory), self.devices[name]
        if size is None or not size.share:
            return size and size.amount
        available = memory_size(device.memory or 0)
        if available is not None and not available.share:
            return available.amount * size.amount
        if device.device is None and canonical(name) is None:
            return None
        return get(device.device or name).memory.bytes * size.amount

    @property
    def all_reduce(self) -> AllReduce:
        """All-reduce of DistributedDataParallel's buckets: measured, a ring or hierarchical."""
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
        # One rank per node sends to the next node, so each link of the ring carries the same bytes.
        bandwidth = min(across.bandwidth, nodes.bandwidth or across.bandwidth)
        return CollectiveLink(bandwidth, across.latency)

    @property
    def exchange(self) -> Levels:
        """All-reduce of compressed buckets: encoded between nodes, in FP32 within nodes."""
        nodes = self.nodes
        inside: AllReduce = CollectiveLink(nodes.bandwidth or math.inf, nodes.latency)
        if nodes.inside:
            inside = MeasuredCollectives(tuple(nodes.inside), nodes.ranks)
        if nodes.across:
            count = nodes.count or self.ranks // nodes.ranks
            return Levels(MeasuredCollectives(tuple(nodes.across), count), inside, nodes.ranks)
        return Levels(self._measured() or self._link(), inside, nodes.ranks)

    def _measured(self) -> MeasuredCollectives | None:
        network = self.network or Network()
        if not network.all_reduce:
            return None
        return MeasuredCollectives(tuple(network.all_reduce), network.ranks or self.ranks)

    def _link(self) -> CollectiveLink:
        network = self.network or Network()
        bandwidths, latencies = [], []
        for name, device in self.devices.items():
            bandwidth, latency = device.bandwidth or network.bandwidth, device.latency
            if bandwidth is None:
                message = f"neither the link of {shown(name)} nor [network] has a bandwidth"
                raise ProfileError(message, do=_REMEDY)
            bandwidths.append(bandwidth)
            latencies.append(network.latency if latency is None else latency)
        return CollectiveLink(min(bandwidths), max(latencies))

    def _uneven(self) -> str | None:
        """Return why nodes do not match devices and links; None if they match."""
        size = self.nodes.ranks
        counts = [device.count for device in self.devices.values()]
        if self.nodes.across:
            # Measurements describe existing nodes, which may mix device classes.
            counts = [self.ranks]
        for count in counts:
            if count % size:
                return f" has {count} devices, which do not make nodes of {size}"
        measured = self.network is not None and self.network.all_reduce
        if 1 < size < self.ranks and measured and not self.nodes.across:
            return (
                " has a measured all_reduce, which does not separate nodes; give a bandwidth, or "
                "measurements inside and across nodes"
            )
        return None

    def check_names(self, names: Mapping[str, object], of: str) -> None:
        """Raise `ProfileError` unless `names` are exactly the device classes of the cluster."""
        if unknown := [name for name in names if name not in self.devices]:
            message = f"the cluster has no devices {shown(unknown[0])}"
            raise ProfileError(message, where=of, do=nearest(unknown[0][:40], self.devices))
        if missing := [name for name in self.devices if name not in names]:
            message = f"there is none for the devices {shown(missing[0])}"
            raise ProfileError(message, where=of, do="give one for each class")


_REMEDY: Final = 'run "qsync docs replayer" for an example'
CLUSTER: Final = TomlSchema(
    Cluster,
    noun="cluster",
    error=ProfileError,
    remedy=_REMEDY,
    name=None,
    largest=2**20,
    checks=CHECKS,
)
