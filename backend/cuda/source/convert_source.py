"""The source of copies and conversions of matrices.

Plain CUDA: what it does is in cpp/cutlass/plain, `convert.cuh` (a matrix, a tile) and `convert_library.cuh` (what is launched for what).

Invariant: one library copies whatever has 8, 16 or 32 bits; a library for each type of number converts it to the three types of floats.
All of them turn and fill up.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.kernel.config import Arch
from qsync_fx.backend.cuda.source.unit import Unit

ELEMENTS: Final = {
    "bits8": 0, "bits16": 1, "bits32": 2, "int8": 3, "fp8": 4, "fp8_e5m2": 5, "fp16": 6, "bf16": 7, "fp32": 8,
}  # fmt: skip
"""`x_type` and `y_type` of the arguments: bits as they are, and formats by their names in `qsync_fx.precision`."""

NUMBERS: Final = ("int8", "fp8", "fp8_e5m2", "fp16", "bf16", "fp32")
"""What is converted."""

FLOATS: Final = ("fp16", "bf16", "fp32")
"""What it is converted to."""

_NAMES: Final = {
    "int8": "INT8",
    "fp8": "E4M3",
    "fp8_e5m2": "E5M2",
    "fp16": "FLOAT16",
    "bf16": "BFLOAT16",
    "fp32": "FLOAT32",
}


def copier(arch: Arch) -> Unit:
    """Returns what is to be compiled to copy matrices as they are."""
    return _unit(f"copy_{arch}", arch, "qsync::Bits")


def converter(arch: Arch, x: str) -> Unit:
    """Returns what is to be compiled to convert numbers in the format `x` to floats."""
    return _unit(f"convert_{arch}_{x}", arch, f"qsync::FloatsOf<qsync::Element::{_NAMES[x]}>")


def _unit(name: str, arch: Arch, library: str) -> Unit:
    source = f'#include "plain/convert_library.cuh"\n\nQSYNC_CONVERT("{name}", {library})\n'
    return Unit(name=name, arch=arch, source=source, interface="convert")
