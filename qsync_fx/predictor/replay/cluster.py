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
"""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from qsync_fx.codec import Path
from qsync_fx.codec.toml import TomlSchema
from qsync_fx.devices.known import check_exists, get, names
from qsync_fx.errors import DeviceError, ProfileError, nearest, shown
from qsync_fx.predictor.replay.cluster_parts import CHECKS, Buckets, Compression, Device, Network, Nodes
from qsync_fx.predictor.replay.collectives import AllReduce, Levels, Link, Measured
from qsync_fx.predictor.replay.memory_size import Memory, memory_size
from qsync_fx.predictor.replay.step import Overlap


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
    buckets: Buckets = field(default_factory=Buckets)
    compression: Compression | None = None
    nodes: Nodes = field(default_factory=Nodes)

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
        found = CLUSTER.load(path)
        for name, device in found.devices.items():
            if device.device is not None:
                _check_device(path, name, device.device)
        folder = pathlib.Path(os.fspath(path)).parent
        return replace(found, devices={name: _beside(folder, device) for name, device in found.devices.items()})

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
        known = memory_size(device.memory or 0)
        if known is not None and not known.share:
            return known.amount * size.amount
        called = device.device or name
        return get(called).memory.bytes * size.amount if device.device or called in names() else None

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
        return Link(min(across.bandwidth, nodes.bandwidth or across.bandwidth), across.latency)

    @property
    def exchange(self) -> Levels:
        """How long it takes to send a bucket that is coded: between nodes in a codec, and inside them in FP32.

        Raises:
            ProfileError: how fast links are is not known.
        """
        nodes = self.nodes
        inside: AllReduce = Link(nodes.bandwidth or math.inf, nodes.latency)
        if nodes.inside:
            inside = Measured(tuple(nodes.inside), nodes.ranks)
        if nodes.across:
            return Levels(Measured(tuple(nodes.across), nodes.count or self.ranks // nodes.ranks), inside, nodes.ranks)
        return Levels(self._measured() or self._link(), inside, nodes.ranks)

    def _measured(self) -> Measured | None:
        """How long an all-reduce of all ranks took, where that was measured."""
        network = self.network or Network()
        return Measured(tuple(network.all_reduce), network.ranks or self.ranks) if network.all_reduce else None

    def _link(self) -> Link:
        network = self.network or Network()
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
        if self.nodes.across:
            # What was measured is of nodes as they are, whatever devices share one.
            whole = self.ranks % size == 0
            return None if whole else f" has {self.ranks} devices, which do not make nodes of {size}"
        for name, device in self.devices.items():
            if device.count % size:
                return f" has {device.count} devices {shown(name)}, which do not make nodes of {size}"
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
            what = f"the cluster has no devices {shown(unknown[0])}"
            raise ProfileError(what, where=of, do=nearest(unknown[0][:40], self.devices))
        if missing := [name for name in self.devices if name not in names]:
            raise ProfileError(
                f"there is none for the devices {shown(missing[0])}", where=of, do="give one for each class"
            )


_REMEDY: Final = "see the example in docs/predictor.md"


def _check_device(path: Path, name: str, device: str) -> None:
    try:
        check_exists(device)
    except DeviceError as error:
        raise ProfileError(error.what, where=f"{shown(str(path))}, devices.{name}.device", do=error.do) from error


def _beside(folder: pathlib.Path, device: Device) -> Device:
    return device if device.profile is None else replace(device, profile=str(folder / device.profile))


CLUSTER: Final = TomlSchema(
    Cluster,
    noun="cluster",
    error=ProfileError,
    remedy=_REMEDY,
    name=None,
    largest=2**20,
    checks=CHECKS,
)
