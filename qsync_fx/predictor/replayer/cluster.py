"""Clusters: device classes, links between devices, and settings of the gradient exchange.

docs/replayer.md describes the TOML file, and the folder `clusters` has clusters of papers. Every
`Cluster` can be replayed: invalid values from a file or from Python raise an error with the cause
and the location.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, NamedTuple, get_args

from qsync_fx.devices.device_catalog import canonical, check_exists, get, is_path
from qsync_fx.errors import DeviceError, ProfileError, nearest, shown
from qsync_fx.predictor.replayer.collectives import (
    BUCKET_BYTES,
    FIRST_BYTES,
    AllReduce,
    CollectiveLink,
    InnerLinks,
    Levels,
    MeasuredCollectives,
    MeasuredExchange,
)
from qsync_fx.serialization.schema import Check, Path, TomlSchema

Memory = float | int | str
Transport = Literal["point_to_point", "collective"]
"""Transport of compressed gradients; docs/communication.md describes both."""
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)
RankGroup = Literal["all", "inside", "between"]
"""Ranks of an exchange: all, the ranks of a node, or one rank of each node."""

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
class Node:
    """Node of one class of devices: ranks with fast links inside and one shared link to others.

    Attributes:
        ranks: ranks per node. With 1, only the network links devices.
        bandwidth: bytes per second that each rank sends within the node.
        latency: seconds of the smallest all-reduce within the node.
    """

    ranks: int = 1
    bandwidth: float | None = None
    latency: float = 0.0


@dataclass(frozen=True)
class ClusterDevice:
    """Class of equal devices.

    Attributes:
        device: name of a device of the catalog; None if a profile supplies the times.
        profile: path of a profile, relative to the folder of the cluster file.
        memory: memory available to a plan: bytes, "4 GB", or "30%" of the catalog device's memory.
        bandwidth, latency: of its link, or of its node's link; None for the network's values.
        node: its nodes; by default, each device is a node.
        slowdown: factor on the durations of its profile.
        delay: seconds per step that it waits for other causes, such as data loading.
        launch: seconds that the host needs to launch one entry of its schedule.
        copies: seconds per byte that DistributedDataParallel needs to copy gradients into a bucket,
            and again to copy them back; None for the value of the device's profile.
        price_per_hour: price of one device for an hour, in any currency; None if unknown.
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
    price_per_hour: float | None = None
    node: Node = field(default_factory=Node)


@dataclass(frozen=True)
class Exchange:
    """Measured durations of one phase of an exchange of compressed gradients.

    In a phase, each rank sends a message to each other rank of its group.

    Attributes:
        transport: transport of the messages.
        group: ranks that exchange; all groups of a kind exchange at once.
        ranks: ranks of a group.
        seconds: pairs of the bytes that a rank sends to all others of its group together, and
            seconds of the slowest rank.
    """

    transport: Transport
    group: RankGroup
    ranks: int
    seconds: list[tuple[float, float]]


@dataclass(frozen=True)
class Network:
    """Network between nodes, or between devices if each one is a node.

    Attributes:
        bandwidth: bytes per second of each node's link, which its ranks share.
        latency: seconds of the smallest all-reduce (between nodes, if there are nodes).
        all_reduce: measured pairs of bytes and seconds of DistributedDataParallel's all-reduce of
            all ranks, which replace bandwidth and latency for uncompressed gradients.
        ranks: number of ranks in these measurements; None for all devices of the cluster.
        busy: computation delay per second of transfer of a bucket that travels alone: 0 if other
            cores send and sum, 1 if the computing cores do, more if both slow each other down.
        coding: computation delay per second in which codecs encode and decode; None for the value
            of `busy`, at most 1.
        ring: whether DistributedDataParallel's all-reduce is one ring through all ranks, as with
            gloo; otherwise it is hierarchical.
        exchanges: measured exchanges of compressed gradients, one per transport and group, which
            replace bandwidth and latency for these.
        transport: transport of compressed gradients, which selects one of `exchanges`.
    """

    bandwidth: float | None = None
    latency: float = 0.0
    all_reduce: list[tuple[float, float]] = field(default_factory=list)
    ranks: int | None = None
    busy: float = 0.0
    coding: float | None = None
    ring: bool = False
    exchanges: list[Exchange] = field(default_factory=list)
    transport: Transport = "point_to_point"

    def exchange(self, group: RankGroup) -> Exchange | None:
        """Return the measured exchange of a group by the transport in use; None without one."""
        used = (self.transport, group)
        return next((x for x in self.exchanges if (x.transport, x.group) == used), None)


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
    kinds = [(exchange.transport, exchange.group) for exchange in network.exchanges]
    if len({*kinds}) < len(kinds):
        return " has two exchanges of the same transport and group"
    return _positive(network)


def _exchange(exchange: Exchange) -> str | None:
    if exchange.ranks < 2:
        return " has an exchange of fewer than 2 ranks"
    if not exchange.seconds:
        return " has an exchange without measurements"
    return _table("seconds", exchange.seconds)


CHECKS: Final[Mapping[Any, Check]] = {
    ClusterDevice: _device,
    Network: _network,
    Exchange: _exchange,
    Node: _positive,
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

    replaced_fields: ClassVar[Mapping[str, str]] = {
        "nodes": "describe the nodes of each class of devices, in [devices.NAME.node]"
    }

    def __post_init__(self) -> None:
        if not self.devices:
            raise ProfileError("the cluster has no devices", do=_REMEDY)
        # The schema checks files and knows the location. This check is for Python callers.
        parts = {f"devices.{name}": device for name, device in self.devices.items()} | vars(self)
        parts |= {f"devices.{name}.node": device.node for name, device in self.devices.items()}
        for where, part in parts.items():
            if type(part) in CHECKS and (why := CHECKS[type(part)](part)):
                raise ProfileError(f"the cluster{why}", where=where, do=_REMEDY)
        self._check_nodes()

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Return the cluster in a TOML file, or one of qsync_fx by its name, such as "cluster-a".

        Raises:
            ProfileError: there is no such cluster, or the file is invalid.
        """
        path = _path_of(path)
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
    def nodes(self) -> int:
        """Number of nodes."""
        sizes = {device.node.ranks for device in self.devices.values()}
        if len(sizes) == 1:
            return self.ranks // sizes.pop()
        return sum(device.count // device.node.ranks for device in self.devices.values())

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of each node, which codecs between nodes require to be equal.

        Raises:
            ProfileError: classes have nodes of different sizes.
        """
        sizes = {name: device.node.ranks for name, device in self.devices.items()}
        if len({*sizes.values()}) > 1:
            text = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            message = f"codecs require nodes of an equal number of ranks, not of {text}"
            do = "plan without codecs, or give each class of devices the same number"
            raise ProfileError(message, where="devices", do=do)
        return next(iter(sizes.values()))

    @property
    def transport(self) -> Transport:
        """Transport of compressed gradients."""
        return (self.network or Network()).transport

    @property
    def samples(self) -> int | None:
        """Samples of a step; None if the batch of a device is unknown."""
        batches = [item.batch * item.count for item in self.devices.values() if item.batch]
        return sum(batches) if len(batches) == len(self.devices) else None

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices for an hour; None if the price of a class is unknown."""
        prices = [
            item.count * item.price_per_hour
            for item in self.devices.values()
            if item.price_per_hour
        ]
        return sum(prices) if len(prices) == len(self.devices) else None

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
        network = self.network or Network()
        if network.all_reduce:
            return MeasuredCollectives(tuple(network.all_reduce), network.ranks or self.ranks)
        if self.nodes == self.ranks:
            return self._link()
        inside = self._inside()
        if not network.ring:
            return Levels(self._across(), inside, self.nodes)
        if self.nodes == 1:
            return inside[0].links
        across, inner = self._link(), [device.node.bandwidth for device in self.devices.values()]
        # One rank per node sends to the next node, so each link of the ring carries the same bytes.
        return CollectiveLink(min(across.bandwidth, *filter(None, inner)), across.latency)

    @property
    def exchange(self) -> Levels:
        """All-reduce of compressed buckets: encoded between nodes, in FP32 or encoded within nodes.

        Durations are measured with the network's transport, or computed from its links.

        Raises:
            ProfileError: all-reduces were measured, but no exchange with this transport.
        """
        size = self.ranks_per_node
        if size == 1:
            return Levels(self.flat_exchange, (), self.nodes)
        across = self._measured("between", size) or self._across()
        measured = self._measured("inside")
        inside = self._inside() if measured is None else (InnerLinks(size, measured),)
        return Levels(across, inside, self.nodes)

    @property
    def flat_exchange(self) -> AllReduce:
        """All-reduce of compressed buckets between all ranks, as `exchange` without nodes."""
        return self._measured("all") or self._link()

    def _across(self) -> CollectiveLink:
        return CollectiveLink(math.inf) if self.nodes == 1 else self._link()

    def _inside(self) -> tuple[InnerLinks, ...]:
        result = []
        for name, device in self.devices.items():
            node = device.node
            if node.ranks > 1 and node.bandwidth is None:
                message = f"the links inside the nodes of {shown(name)} have no bandwidth"
                raise ProfileError(message, where=f"devices.{name}.node", do=_REMEDY)
            link = CollectiveLink(node.bandwidth or math.inf, node.latency)
            result.append(InnerLinks(node.ranks, link))
        return tuple(dict.fromkeys(result))

    def _measured(self, group: RankGroup, groups: int = 1) -> MeasuredExchange | None:
        if self.network is None or (exchange := self.network.exchange(group)) is None:
            return None
        return MeasuredExchange(tuple(exchange.seconds), groups)

    def _link(self) -> CollectiveLink:
        network = self.network or Network()
        bandwidths, latencies = [], []
        for name, device in self.devices.items():
            bandwidth, latency = device.bandwidth or network.bandwidth, device.latency
            if bandwidth is None and network.all_reduce:
                message = "all-reduces were measured, but no exchange of compressed gradients with "
                message += f"the transport {network.transport}"
                do = "measure the profile again, on several ranks, or give [network] a bandwidth "
                do += "or exchanges"
                raise ProfileError(message, where="network", do=do)
            if bandwidth is None:
                message = f"neither the link of {shown(name)} nor [network] has a bandwidth"
                raise ProfileError(message, do=_REMEDY)
            bandwidths.append(bandwidth)
            latencies.append(network.latency if latency is None else latency)
        return CollectiveLink(min(bandwidths), max(latencies))

    def _check_nodes(self) -> None:
        """Raise `ProfileError` if nodes do not match devices and links."""
        network, sizes = self.network, {device.node.ranks for device in self.devices.values()}
        # Measurements describe existing nodes, which may mix device classes. A cluster without a
        # network gets them from a profile.
        mixed = network is None or any(x.group != "all" for x in network.exchanges)
        mixed = mixed and len(sizes) == 1
        linked = network is not None and not (network.all_reduce or network.exchange("inside"))
        for name, device in self.devices.items():
            node, count, why = device.node, self.ranks if mixed else device.count, ""
            if count % node.ranks:
                why = f" has {count} devices, which do not make nodes of {node.ranks}"
            elif node.ranks > 1 and node.bandwidth is None and linked:
                why = f" has nodes of {node.ranks} ranks without a bandwidth of the links inside"
            if why:
                raise ProfileError(f"the cluster{why}", where=f"devices.{name}.node", do=_REMEDY)

    def without(self, name: str) -> Cluster | None:
        """Return the cluster without a class; None if the other ranks fill no complete nodes."""
        return self.only([other for other in self.devices if other != name])

    def only(self, names: Collection[str]) -> Cluster | None:
        """Return the cluster of some classes; None if their ranks fill no complete nodes."""
        devices = {name: device for name, device in self.devices.items() if name in names}
        try:
            return replace(self, devices=devices)
        except ProfileError:
            return None

    def without_transfers(self) -> Cluster:
        """Return the cluster with gradients that are sent in no time and without copies."""
        devices = {
            name: replace(
                device,
                bandwidth=None,
                latency=None,
                copies=0.0,
                node=replace(device.node, bandwidth=_INSTANT, latency=0.0),
            )
            for name, device in self.devices.items()
        }
        return replace(self, devices=devices, network=Network(_INSTANT), compression=None)

    def check_names(self, names: Mapping[str, object], of: str) -> None:
        """Raise `ProfileError` unless `names` are exactly the device classes of the cluster."""
        if unknown := [name for name in names if name not in self.devices]:
            message = f"the cluster has no devices {shown(unknown[0])}"
            raise ProfileError(message, where=of, do=nearest(unknown[0][:40], self.devices))
        if missing := [name for name in self.devices if name not in names]:
            message = f"there is none for the devices {shown(missing[0])}"
            raise ProfileError(message, where=of, do="give one for each class")


_INSTANT: Final = 1e30
"""Bandwidth in bytes per second of a link whose transfers take no time."""
_CLUSTERS: Final = pathlib.Path(__file__).parent / "clusters"


def _path_of(path: Path) -> Path:
    """Return the path of a cluster file for a path, or for the name of a cluster of qsync_fx."""
    if isinstance(path, os.PathLike) or is_path(path) or pathlib.Path(path).exists():
        return path
    files = {file.stem: file for file in _CLUSTERS.glob("*.toml")}
    if path not in files:
        do = f"{nearest(path[:40], files)}; or use the path of a TOML file"
        raise ProfileError(f"unknown cluster {shown(path)}", do=do)
    return files[path]


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
