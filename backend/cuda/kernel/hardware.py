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
