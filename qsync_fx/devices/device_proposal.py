"""Proposal of a device file for a GPU, from the properties that torch reports.

The catalog has GPUs of each architecture. Peaks are computed from the operations per cycle of one
of them, and efficiencies are carried over from it, so that times are a guide only.
"""

from __future__ import annotations

import re
from typing import Protocol

from qsync_fx.devices.device_catalog import get, shipped
from qsync_fx.devices.device_model import DEVICE, Device
from qsync_fx.errors import DeviceError


class GpuProperties(Protocol):
    """Fields of `torch.cuda.get_device_properties` that a proposal reads.

    Attributes:
        total_memory, L2_cache_size: bytes.
        clock_rate, memory_clock_rate: kHz; the memory transfers twice per cycle.
        memory_bus_width: bits.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int


def template(capability: tuple[int, int], geforce: bool) -> Device:
    """Return the catalog GPU whose operations per cycle a GPU of this architecture has.

    It has the same compute capability, or the next lower one in the catalog, and is a GeForce card
    if possible and requested, since these add products in FP32 at half the rate. Of several, it is
    the one with most operations per cycle.

    Raises:
        DeviceError: all GPUs of the catalog are newer.
    """
    gpus = [device for device in map(get, shipped()) if device.capability is not None]
    older = [gpu for gpu in gpus if gpu.capability is not None and gpu.capability <= capability]
    if not older:
        version = ".".join(map(str, capability))
        message = f"the catalog has no GPU as old as compute capability {version}"
        do = "write a device file by hand: qsync docs howto-device"
        raise DeviceError(message, where="device file", do=do)

    def preference(gpu: Device) -> tuple[tuple[int, int], bool, float]:
        operations = sum(unit.peak for unit in gpu.units.values())
        same_kind = is_geforce(gpu.title) == geforce
        return gpu.capability or (0, 0), same_kind, operations / (gpu.processors * gpu.clock)

    return max(older, key=preference)


def is_geforce(title: str) -> bool:
    """Return whether a GPU is a GeForce card, by its name."""
    return "geforce" in title.casefold()


def propose(gpu: GpuProperties) -> str:
    """Return the text of a device file for a GPU; write it to NAME.toml, see `proposed_name`.

    Raises:
        DeviceError: the GPU is too old or calibrated itself, or torch reports no clock or bus.
    """
    unknown = [
        field
        for field in ("clock_rate", "memory_clock_rate", "memory_bus_width", "L2_cache_size")
        if not getattr(gpu, field, 0)
    ]
    if unknown:
        message = f"torch reports no {' and no '.join(unknown)} of {gpu.name}"
        do = "write a device file by hand, from the data sheet: qsync docs howto-device"
        raise DeviceError(message, where="torch.cuda.get_device_properties", do=do)
    like = template((gpu.major, gpu.minor), is_geforce(gpu.name))
    cycles = gpu.multi_processor_count * gpu.clock_rate * 1e3
    scale = cycles / (like.processors * like.clock)
    bandwidth = 2 * gpu.memory_clock_rate * 1e3 * gpu.memory_bus_width / 8
    source = "torch.cuda.get_device_properties"
    carried = f"carried over from {like.name}"
    name, calibrated = proposed_name(gpu.name), like.calibrated_as or like.name
    if name == calibrated:
        do = f"use the name {name} of the catalog"
        raise DeviceError(f"the catalog has the times of {gpu.name}", where="device file", do=do)
    lines = [
        f'name = "{name}"',
        f"title = {_quoted(gpu.name)}",
        'kind = "gpu"',
        f"capability = [{gpu.major}, {gpu.minor}]",
        f"processors = {gpu.multi_processor_count}",
        f"clock = {gpu.clock_rate * 1e3:.6g}",
        f'calibrated_as = "{calibrated}"',
        f'source = "{source}; efficiencies: carried over from {calibrated}"',
        "",
        "[memory]",
        f"bytes = {gpu.total_memory}",
        f"bandwidth = {bandwidth:.6g}",
        f"fraction = {like.memory.fraction}",
        f"cache = {gpu.L2_cache_size}",
        f"cache_bandwidth = {like.memory.cache_bandwidth * scale:.3g}",
        f"host = {like.memory.host:.3g}",
        f'source = "bytes, bandwidth and cache: {source}; fraction and host: {carried}; '
        f'cache_bandwidth: {carried}, by processors and clock"',
        "",
        "[units]",
    ]
    for fmt, unit in like.units.items():
        line = f'peak = {unit.peak * scale:.4g}, source = "{carried}, by processors and clock"'
        lines.append(f"{fmt} = {{{line}}}")
    text = "\n".join(lines) + "\n"
    DEVICE.decode(text.encode())
    return text


def proposed_name(name: str) -> str:
    """Return the name of a GPU's device file: "rtx-3090" for "NVIDIA GeForce RTX 3090"."""
    words = re.findall(r"[a-z0-9.]+", name.casefold())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def _quoted(text: str) -> str:
    return '"' + re.sub(r'[\\"\x00-\x1f]', "", text) + '"'
