"""Clusters: device classes, links between devices, and settings of the gradient exchange.

docs/replayer.md has an example of the TOML file. Invariant: every `Cluster` can be replayed.
Invalid values from a file or from Python raise an error with the cause and the location.
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
    BUCKET_BYTES,
    FIRST_BYTES,
    AllReduce,
    CollectiveLink,
    Levels,
    MeasuredCollectives,
)
from qsync_fx.predictor.replayer.device_timeline import Overlap
from qsync_fx.serialization.schema import Check, Path, TomlSchema

Memory = float | int | str

_UNITS: Final = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9} | {
    "KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30
}  # fmt: skip
WAYS: Final = 'give bytes, "4 GB" or "30%"'
"""Advice for an invalid memory size."""


class Size(NamedTuple):
    """Amount of memory.

    Attributes:
        amount: bytes, or a share of the total memory, 1 for all of it.
        share: whether `amount` is a share.
    """

    amount: float
    share: bool = False


def memory_size(memory: Memory) -> Size | None:
    """Return the parsed amount of memory; None if it is invalid."""
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
    """Class of equal devices.

    Attributes:
        count: number of devices.
        device: name of a device of the catalog; None if a profile supplies the times.
        profile: path of a profile, relative to the folder of the cluster file.
        batch: samples per device and step; None if unknown.
        memory: memory available to a plan: bytes, "4 GB", or "30%" of the catalog device's memory;
            None if unknown.
        bandwidth, latency: of its link, or of its node's link; None for the network's values.
        slowdown: factor on the durations of its profile; 1.1 for 10% slower.
        delay: seconds per step that it waits for other causes, such as data loading.
        launch: seconds that the host needs to launch one entry of its schedule.
        copies: seconds per byte that DistributedDataParallel needs to copy gradients into a bucket,
            and again to copy them back. None for the value of the device's profile, 0 if it has
            none.
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
        busy: computation delay per second of transfer of a bucket that travels alone. It is 0 if
            other cores send and sum, 1 if the computing cores do, and more if both slow each other
            down. Link measurements determine it together with the all-reduces.
        coding: computation delay per second in which codecs encode and decode; None for the value
            of `busy`, at most 1.
        slows_compute: relative slowdown of computation while a bucket travels; 0.1 for 10%.
        slows_transfer: relative slowdown of a transfer while a device computes.
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
    """Nodes: groups of ranks of one class with fast links inside and one shared link to others.

    Attributes:
        ranks: ranks per node. With 1, only the network links devices.
        bandwidth: bytes per second that each rank sends within the node. Several ranks per node
            require it or `inside`.
        latency: seconds of the smallest all-reduce within a node.
        ring: whether DistributedDataParallel's all-reduce is one ring through all ranks, as with
            gloo; otherwise it is hierarchical.
        inside: measured pairs of bytes and seconds of all-reduces within a node, which replace
            bandwidth and latency.
        across: measured pairs for all-reduces between nodes. The bytes are the total of the ranks
            of a node, whose shards travel concurrently. For compressed buckets they replace the
            network's measurements, which then describe all-reduces of all ranks only.
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
        first_bytes: size at which the first bucket is full.
        bytes: size at which further buckets are full.
        whole_graphs: whether all gradients of a compiled graph become ready together, as with
            torch._dynamo.config.optimize_ddp = False. Otherwise DistributedDataParallel splits
            graphs at bucket boundaries, and each bucket is sent after its last gradient.
    """

    first_bytes: int = FIRST_BYTES
    bytes: int = BUCKET_BYTES
    whole_graphs: bool = False


@dataclass(frozen=True)
class Compression:
    """Compression of gradients before the transfer.

    Attributes:
        ratio: transferred bytes per byte of a gradient.
        fixed: seconds per bucket on each device, between its last gradient and the transfer.
        each: seconds per byte of gradients, in addition to `fixed`.
    """

    ratio: float = 1.0
    fixed: float = 0.0
    each: float = 0.0


_ZERO_IS_FINE: Final = frozenset(
    "latency delay launch busy coding slows_compute slows_transfer fixed each copies".split()
)


def _positive(value: Any) -> str | None:
    """Return a message for an invalid number among the fields of a value; None if all are valid."""
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
        buckets: bucket settings.
        compression: compression of all buckets; None for none.
        nodes: grouping of ranks into nodes.
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
            ProfileError: the file cannot be read, is not a cluster, or names an unknown device.
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
        """Number of devices."""
        return sum(device.count for device in self.devices.values())

    def bytes_of(self, name: str, memory: Memory) -> float | None:
        """Return an amount of memory of a device class in bytes.

        A share refers to the memory in the cluster, else to the memory in the catalog. None if both
        are unknown or the amount is invalid.
        """
        size = memory_size(memory)
        if size is None:
            return None
        if not size.share:
            return size.amount
        device = self.devices[name]
        available = memory_size(device.memory or 0)
        if available is not None and not available.share:
            return available.amount * size.amount
        called = device.device or name
        if device.device is None and called not in names():
            return None
        return get(called).memory.bytes * size.amount

    @property
    def all_reduce(self) -> AllReduce:
        """All-reduce of DistributedDataParallel's buckets.

        It is the measured one if there is a measurement, else a ring over all links or a
        hierarchical all-reduce.

        Raises:
            ProfileError: the bandwidth of a link is unknown.
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
        # One rank per node sends to the next node, so each link of the ring carries the same bytes.
        return CollectiveLink(
            min(across.bandwidth, nodes.bandwidth or across.bandwidth), across.latency
        )

    @property
    def exchange(self) -> Levels:
        """All-reduce of compressed buckets: encoded between nodes, in FP32 within nodes.

        Raises:
            ProfileError: the bandwidth of a link is unknown.
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
        """Return the measured all-reduce of all ranks, if any."""
        network = self.network or Network()
        if not network.all_reduce:
            return None
        return MeasuredCollectives(tuple(network.all_reduce), network.ranks or self.ranks)

    def _link(self) -> CollectiveLink:
        network = self.network or Network()
        bandwidths = []
        for name, device in self.devices.items():
            if (bandwidth := device.bandwidth or network.bandwidth) is None:
                raise ProfileError(
                    f"neither the link of {shown(name)} nor [network] has a bandwidth", do=_REMEDY
                )
            bandwidths.append(bandwidth)
        latencies = [
            network.latency if item.latency is None else item.latency
            for item in self.devices.values()
        ]
        return CollectiveLink(min(bandwidths), max(latencies))

    def _uneven(self) -> str | None:
        """Return why nodes do not match devices and links; None if they match."""
        size = self.nodes.ranks
        if self.nodes.across:
            # Measurements describe existing nodes, which may mix device classes.
            if self.ranks % size == 0:
                return None
            return f" has {self.ranks} devices, which do not make nodes of {size}"
        for name, device in self.devices.items():
            if device.count % size:
                return (
                    f" has {device.count} devices {shown(name)}, which do not make nodes of {size}"
                )
        if 1 < size < self.ranks and self.network is not None and self.network.all_reduce:
            return (
                " has a measured all_reduce, which does not separate nodes; give a bandwidth, or "
                "measurements inside and across nodes"
            )
        return None

    @property
    def overlap(self) -> Overlap:
        """Mutual slowdown of communication and computation."""
        network = self.network or Network()
        return Overlap(network.slows_compute, network.slows_transfer)

    def check_names(self, names: Mapping[str, object], of: str) -> None:
        """Raise `ProfileError` unless `names` are exactly the device classes of the cluster."""
        if unknown := [name for name in names if name not in self.devices]:
            message = f"the cluster has no devices {shown(unknown[0])}"
            raise ProfileError(message, where=of, do=nearest(unknown[0][:40], self.devices))
        if missing := [name for name in self.devices if name not in names]:
            message = f"there is none for the devices {shown(missing[0])}"
            raise ProfileError(message, where=of, do="give one for each class")


_REMEDY: Final = 'run "qsync docs replayer" for an example'


def _check_device(path: Path, name: str, device: str) -> None:
    try:
        check_exists(device)
    except DeviceError as error:
        raise ProfileError(
            error.what, where=f"{shown(str(path))}, devices.{name}.device", do=error.do
        ) from error


def _beside(folder: pathlib.Path, device: ClusterDevice) -> ClusterDevice:
    if device.profile is None:
        return device
    return replace(device, profile=str(folder / device.profile))


CLUSTER: Final = TomlSchema(
    Cluster,
    noun="cluster",
    error=ProfileError,
    remedy=_REMEDY,
    name=None,
    largest=2**20,
    checks=CHECKS,
)
