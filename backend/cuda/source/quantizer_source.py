"""The source of a quantizer: largest magnitude and rounding of one type to one format.

Plain CUDA: what it computes is in cpp/cutlass/plain, `rounding.cuh` (one value), `eighths.cuh` (eight), `absmax.cuh` (scales) and
`quantizer.cuh` (a matrix).

Invariant: one library a (type, format) pair has every way to round, every grouping, with and without the transpose; what the others share
is little, and a model needs few of them.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.backend.cuda.kernel.config import Arch
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.precision import Precision, encoding

X_TYPES: Final = {"fp32": 0, "fp16": 1, "bf16": 2}
"""`x_type` of the arguments, by the name of the format in `qsync_fx.precision`."""

FORMATS: Final = {"int8": 0, "fp8": 1, "fp8_e5m2": 2}
"""`format` of the arguments, by the name of the format's `encoding`."""

ROUNDINGS: Final = {"nearest": 0, "stochastic": 1, "floor": 2}
"""`rounding` of the arguments."""

_X_NAMES: Final = {"fp32": "FLOAT32", "fp16": "FLOAT16", "bf16": "BFLOAT16"}
_FORMAT_NAMES: Final = {"int8": "INT8", "fp8": "E4M3", "fp8_e5m2": "E5M2"}


def written(row: Precision) -> str | None:
    """Returns the name under which a quantizer writes the values of a format; None where there is none."""
    name = encoding(row).name
    return name if name in FORMATS else None


def quantizer(arch: Arch, x: str, fmt: str) -> Unit:
    """Returns what is to be compiled to quantize.

    Args:
        arch: the target; any, FP8 needs no unit of its own here.
        x: what is read: "fp32", "fp16" or "bf16".
        fmt: what is written, one of `FORMATS`.
    """
    name = f"quantize_{arch}_{x}_{fmt}"
    source = (
        '#include "plain/quantizer_library.cuh"\n\n'
        f'QSYNC_QUANTIZER("{name}", qsync::{_X_NAMES[x]}, qsync::{_FORMAT_NAMES[fmt]})\n'
    )
    return Unit(name=name, arch=arch, source=source, interface="quantize")
