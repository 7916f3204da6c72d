"""What each architecture has: formats, instructions, shared memory.

Invariant: numbers of NVIDIA's documents, named beside them; what was measured is elsewhere.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.kernel.config import Arch, KernelConfig, Shape
from qsync_fx.precision import FORMATS

SHARED_MEMORY: Final[dict[Arch, int]] = {
    "sm_70": 96 * 1024,
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
}
"""Bytes that one threadblock may have (CUDA C++ Programming Guide, table of technical specifications per compute capability)."""

BY_CAPABILITY: Final[dict[tuple[int, int], Arch]] = {
    (7, 0): "sm_70",
    (7, 5): "sm_75",
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    # Orin has what GeForce cards of its generation have.
    (8, 7): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
}
"""The target that code is compiled for, by compute capability. Machine code runs on no later generation, and "90a" on 9.0 alone."""

FORWARD: Final[tuple[Arch, ...]] = ("sm_80", "sm_89")
"""Targets whose libraries hold PTX too, which the driver compiles for devices that came later, whatever nvcc knows of them."""

MULTIPROCESSORS: Final[dict[Arch, int]] = {
    "sm_70": 80,
    "sm_75": 40,
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90a": 132,
}
"""Of V100, T4, A100, A40, L40 and H100 (NVIDIA's data sheets), where the device itself is not asked."""


def target(capability: tuple[int, int], shared_memory: int | None = None) -> Arch | None:
    """Returns what kernels for a device are compiled for; None where there are none.

    A device that is newer than all of `BY_CAPABILITY` takes the PTX of the one of `FORWARD` whose tiles fit into its shared memory.

    Args:
        shared_memory: bytes that one threadblock may have there; by default what its generation has: data-centre GPUs (10.x, 11.x)
            more than an A100, GeForce and RTX PRO (12.x) as much as an L40.
    """
    if capability in BY_CAPABILITY or capability < max(BY_CAPABILITY):
        return BY_CAPABILITY.get(capability)
    large = capability[0] in (10, 11) if shared_memory is None else shared_memory >= SHARED_MEMORY["sm_80"]
    return "sm_80" if large else "sm_89"


OPERANDS: Final[dict[tuple[str, str], Arch]] = {
    ("int8", "int8"): "sm_70",
    ("fp16", "fp16"): "sm_70",
    ("bf16", "bf16"): "sm_80",
    ("tf32", "tf32"): "sm_80",
    ("fp8", "fp8"): "sm_89",
    ("fp8_e5m2", "fp8"): "sm_89",
    ("fp32", "fp32"): "sm_70",
}
"""Formats of `a` and `b` that there are kernels for, and the first architecture that has them."""

OUTPUTS: Final = ("fp32", "fp16", "bf16")


def wide(arch: Arch) -> str:
    """Returns the format of 16 bits that products run in which a narrower one does not pay for: BF16 where there is a unit for it."""
    return "bf16" if int(arch[3:5]) >= int(OPERANDS["bf16", "bf16"][3:5]) else "fp16"


INSTRUCTIONS: Final[dict[str, Shape]] = {
    "int8": (16, 8, 32),
    "fp16": (16, 8, 16),
    "bf16": (16, 8, 16),
    "tf32": (16, 8, 8),
    "fp8": (16, 8, 32),
    "fp8_e5m2": (16, 8, 32),
}
"""Shapes of `mma` since sm_80 (PTX ISA, warp-level matrix instructions)."""

_BEFORE: Final[dict[Arch, dict[str, Shape]]] = {
    "sm_70": {"fp16": (8, 8, 4)},
    "sm_75": {"int8": (8, 8, 16), "fp16": (16, 8, 8)},
}

_ORDINARY: Final[dict[str, Shape]] = {"fp32": (1, 1, 1), "int8": (1, 1, 4)}
"""What one instruction of an ordinary unit multiplies: dp4a sums four products of INT8."""


def ordinary(arch: Arch, fmt: str) -> bool:
    """Whether ordinary units multiply a format, not tensor cores: FP32, and INT8 before tensor cores had it."""
    return fmt == "fp32" or (arch, fmt) == ("sm_70", "int8")


def size_of(fmt: str) -> int:
    """Returns the bytes in which an operand's value is kept."""
    return FORMATS[fmt].dtype.itemsize


def instruction_of(config: KernelConfig) -> Shape | None:
    """Returns the only shape of instruction that a 2.x kernel of these formats may name; None where there is none."""
    if config.unit == "simt":
        return _ORDINARY.get(config.a)
    return _BEFORE.get(config.arch, INSTRUCTIONS).get(config.a)
