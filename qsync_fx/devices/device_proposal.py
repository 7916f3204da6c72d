"""Proposal of a device file for a GPU, from the properties that torch reports.

Peaks are computed from the operations per cycle of the GPU's architecture. Efficiencies are those
of a calibrated device (`calibrated_as`), so that times are a guide until the GPU is measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Protocol

from qsync_fx.devices.device_model import DEVICE
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


_ADA: Final = {
    "fp64": 4, "fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024,
    "fp8": 2048, "fp8_e5m2": 2048, "int8": 2048,
}  # fmt: skip
OPERATIONS: Final[Mapping[tuple[int, int], Mapping[str, int]]] = {
    (7, 0): {"fp64": 64, "fp32": 128, "fp16": 1024},
    (7, 5): {"fp64": 4, "fp32": 128, "fp16": 1024, "int8": 2048},
    (8, 0): {"fp64": 64, "fp32": 128, "tf32": 1024, "bf16": 2048, "fp16": 2048, "int8": 4096},
    (8, 6): {"fp64": 4, "fp32": 256, "tf32": 512, "bf16": 1024, "fp16": 1024, "int8": 2048},
    (8, 9): _ADA,
    (9, 0): {
        "fp64": 128, "fp32": 256, "tf32": 2048, "bf16": 4096, "fp16": 4096,
        "fp8": 8192, "fp8_e5m2": 8192, "int8": 8192,
    },
    (10, 0): {
        "fp64": 128, "fp32": 256, "tf32": 4096, "bf16": 8192, "fp16": 8192,
        "fp8": 16384, "fp8_e5m2": 16384, "int8": 16384,
    },
    (12, 0): _ADA,
}  # fmt: skip
"""Operations per cycle and multiprocessor by compute capability, 2 per multiply-add, dense."""

HALVED: Final = frozenset({"tf32", "bf16", "fp16", "fp8", "fp8_e5m2"})
"""Tensor-core formats that GeForce cards multiply at half the rate if sums are FP32."""


def operations(capability: tuple[int, int], geforce: bool) -> Mapping[str, int]:
    """Return the operations per cycle and multiprocessor of a GPU, by format.

    Newer architectures than those of `OPERATIONS` get the values of the newest that precedes them.

    Raises:
        DeviceError: the GPU is older than compute capability 7.0.
    """
    known = [item for item in OPERATIONS if item <= capability]
    if not known:
        version = ".".join(map(str, capability))
        message = f"a GPU of compute capability {version} has no tensor cores, so none is proposed"
        do = "write a device file by hand: qsync docs howto-device"
        raise DeviceError(message, where="device file", do=do)
    rates = OPERATIONS[max(known)]
    return {fmt: rate // (1 + (geforce and fmt in HALVED)) for fmt, rate in rates.items()}


def propose(gpu: GpuProperties) -> str:
    """Return the text of a device file for a GPU; write it to NAME.toml, see `proposed_name`.

    Raises:
        DeviceError: the GPU has no tensor cores, or torch reports no clock or memory bus.
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
    capability, geforce = (gpu.major, gpu.minor), "geforce" in gpu.name.casefold()
    rates = operations(capability, geforce)
    cycles = gpu.multi_processor_count * gpu.clock_rate * 1e3
    bandwidth = 2 * gpu.memory_clock_rate * 1e3 * gpu.memory_bus_width / 8
    calibrated = "t4" if capability == (7, 5) else "v100"
    source = "torch.cuda.get_device_properties"
    lines = [
        f'name = "{proposed_name(gpu.name)}"',
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
        "fraction = 0.85",
        f"cache = {gpu.L2_cache_size}",
        f"cache_bandwidth = {20 * cycles:.3g}",
        f'source = "bytes, bandwidth and cache: {source}; fraction: assumed; cache_bandwidth: '
        '20 bytes per cycle and multiprocessor, carried over from t4"',
        "",
        "[units]",
    ]
    for fmt, rate in rates.items():
        half = ", half the rate as sums are FP32" if geforce and fmt in HALVED else ""
        lines.append(
            f"{fmt} = {{peak = {rate * cycles:.4g}, source = "
            f'"{rate} operations per cycle and multiprocessor of this architecture{half}"}}'
        )
    text = "\n".join(lines) + "\n"
    DEVICE.decode(text.encode())
    return text


def proposed_name(name: str) -> str:
    """Return the name of a GPU's device file: "rtx-3090" for "NVIDIA GeForce RTX 3090"."""
    words = re.findall(r"[a-z0-9.]+", name.casefold())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def _quoted(text: str) -> str:
    return '"' + re.sub(r'[\\"\x00-\x1f]', "", text) + '"'
