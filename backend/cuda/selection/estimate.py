"""Conservative estimate of layer times, for layers that were not measured on their device.

The time of a product is the maximum of its multiplications and its memory traffic, plus a launch.
Quantizing an operand is a pass for the scale and a pass for the values. An H200 reached the
constants (`gpu_linear.json` and `gpu_quantize.json` in benchmarks/results); they are not measured
on other GPUs, nor for convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from qsync_fx.backend.cuda.layer_times import LayerTimes, Part, layer_problem
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.tuning import NARROW, TuningTable, counterpart
from qsync_fx.devices.device_model import Device
from qsync_fx.formats import FORMATS

WIDE_OF_PEAK: Final = 0.81
"""Fraction of the data sheet's rate that 16-bit products reach: `F.linear` of 8192 cubed."""

NARROW_OF_PEAK: Final = {"integer": 0.72, "float": 0.6}
"""The same of INT8 and FP8 products: `qsync::gemm` of 8192 cubed."""

LAUNCH_S: Final = 8e-6
"""Seconds of a kernel beyond its work: the quantizers in linear layers of 1024 cubed."""

QUANTIZER_OF_COPY: Final = 0.63
"""Bandwidth of the stochastic quantizer relative to a copy."""

_QUANTIZED_BYTES: Final = 5
"""Bytes per value: two reads of 16 bits and a write; FP32 sources add less to it than to a cast."""

_CONVERTED_BYTES: Final = 3
_COPIED_BYTES: Final = 2


def estimate(
    parts: Mapping[Part, Problem],
    by_kernel: frozenset[Part],
    precision: str,
    wide: str,
    device: Device,
    table: TuningTable | None = None,
) -> LayerTimes:
    """Return the estimated times of a layer.

    Args:
        parts: the product of each part; "forward" is required.
        by_kernel: parts whose narrow product has a kernel; others multiply converted operands.
        precision: name of the narrow format.
        wide: name of the 16-bit format.
        table: measured products, which replace estimated ones.
    """
    seconds: dict[str, float] = {}
    wide_seconds: dict[str, float] = {}
    rounded = False
    for part, problem in parts.items():
        first, second = (math.prod(shape) for shape in problem.shapes[:2])
        narrow, wide_seconds[part] = _products(problem, part in by_kernel, wide, device, table)
        if part == "forward":
            casts = _pass_s(device, first, _QUANTIZED_BYTES, 2) + _pass_s(
                device, second, _QUANTIZED_BYTES, 2
            )
        else:
            casts = 0.0
            if problem.a in NARROW and not rounded:
                # One rounding of the incoming gradient, which also writes its transpose.
                casts, rounded = _pass_s(device, first, _QUANTIZED_BYTES + 1, 2), True
            size = _COPIED_BYTES if part in by_kernel else _CONVERTED_BYTES
            casts += _pass_s(device, second, size, 1)
        seconds[part] = narrow + casts
    return LayerTimes(layer_problem(parts["forward"], wide), precision, seconds, wide_seconds)


def _products(
    problem: Problem, by_kernel: bool, wide: str, device: Device, table: TuningTable | None
) -> tuple[float, float]:
    """Return the seconds of a product in its formats and in `wide`: measured ones if both are."""
    other = counterpart(problem, wide)
    if other is None:
        seconds = product_s(problem, device)
        return seconds, seconds
    choice, rival = (table.choice(item) if table else None for item in (problem, other))
    if choice is not None and rival is not None:
        return choice.best, rival.best
    seconds = product_s(other, device)
    return (product_s(problem, device) if by_kernel else seconds), seconds


def product_s(problem: Problem, device: Device) -> float:
    """Return the estimated seconds of one product in the formats of its operands."""
    fmt = FORMATS[problem.a]
    unit = device.unit(fmt)
    reached = WIDE_OF_PEAK if unit.bits > 8 else NARROW_OF_PEAK[unit.kind]
    widths = (FORMATS[name].dtype.itemsize for name in (problem.a, problem.b, problem.out))
    size = sum(
        math.prod(shape) * width for shape, width in zip(problem.shapes, widths, strict=True)
    )
    computing = problem.flops / (device.units[unit.name].peak * reached)
    return max(computing, size / _bandwidth(device)) + LAUNCH_S


def _pass_s(device: Device, values: int, value_bytes: int, launches: int) -> float:
    """Return the seconds of kernels that read and write `value_bytes` bytes per value in total."""
    return launches * LAUNCH_S + values * value_bytes / (_bandwidth(device) * QUANTIZER_OF_COPY)


def _bandwidth(device: Device) -> float:
    """Return the bytes per second of a copy."""
    return device.memory.bandwidth * device.memory.fraction
