"""The parts of a cluster: classes of devices, links, nodes, buckets, and what is done to gradients.

Invariant: a part is a value, and `CHECKS` says of each what it may not be, whoever has written it: a file, or Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from qsync_fx.codec import Check
from qsync_fx.errors import shown
from qsync_fx.predictor.replay.buckets import BUCKET_BYTES, FIRST_BYTES
from qsync_fx.predictor.replay.memory_size import WAYS, memory_size


@dataclass(frozen=True)
class Device:
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
class Nodes:
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
        if type(number) in (int, float) and (not number >= 0 or (number == 0 and part.name not in _ZERO_IS_FINE)):
            least = "at least" if part.name in _ZERO_IS_FINE else "above"
            return f" has the {part.name} {number}, which must be {least} 0"
    return None


def _device(device: Device) -> str | None:
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


def _nodes(nodes: Nodes) -> str | None:
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
    Device: _device,
    Network: _network,
    Nodes: _nodes,
    Buckets: _positive,
    Compression: _positive,
}
