"""Calibration of catalog devices: fits of roofline constants to published times of products.

Invariant: a fit reads only the points that it is given. Cross-validation holds out complete shapes,
on all devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.published.fitting import Fitting, Numbers
from qsync_fx import devices
from qsync_fx.devices.roofline import (
    ConvolutionSpec,
    GemmShape,
    RooflineMachine,
    Tiles,
    convolved,
    multiplied,
)
from qsync_fx.formats import FP32, precision


@dataclass(frozen=True)
class Point:
    """Measured product.

    Attributes:
        device, precision: device and format.
        product: "gemm", or a product of a convolution.
        shape: (m, n, k), or the sizes of a convolution.
        layout: transposed operands of a matrix product, in BLAS notation.
        seconds: measured duration.
    """

    device: str
    precision: str
    product: str
    shape: tuple[int, ...]
    layout: str
    seconds: float


@dataclass(frozen=True)
class Usual:
    """Prior of a constant: its usual value, its standard deviation and its upper limit."""

    value: float
    spread: float
    most: float = float("inf")

    def at(self, away: float) -> float:
        return min(max(self.value + self.spread * away, 0.0), self.most)


class Factor(Usual):
    """Prior of a positive constant; the spread applies to its logarithm."""

    def at(self, away: float) -> float:
        return min(self.value * float(np.exp(self.spread * away)), self.most)


_TILES: dict[str, Usual] = {
    "efficiency": Factor(0.75, 0.2, 1.05),
    "small_tiles": Usual(0.4, 0.2),
    "latency": Factor(40.0, 0.4),
    "alone": Factor(0.8, 0.25, 1.0),
    "prologue": Usual(60.0, 40.0),
    "reduction": Factor(1.0, 0.4),
    "memory": Factor(0.75, 0.15, 1.0),
    "overlap": Factor(2.0, 0.3),
    "launch": Factor(5e-6, 0.4),
    "throttle": Usual(0.03, 0.03),
}
_GEMM = {
    "efficiency": Factor(0.7, 0.4, 1.05),
    "misaligned": Factor(1.2, 1.0),
    "tn": Factor(1.0, 0.1),
    "nt": Factor(1.0, 0.1),
}
_CONVOLUTION = {"gather": Usual(0.05, 0.1), "floor": Factor(1e-5, 0.4)}
_TENSOR_CORES = {"relayout": Usual(0.5, 0.4), "weights": Usual(1.0, 0.7)}
_PADDED = {"ordinary": Factor(0.4, 0.3)}
_LAID_OUT = {"floor": Factor(2.5e-5, 0.4)}
"""Tensor cores: kernels before and after the input gradient change layouts."""
_FP32 = {
    "prologue": Usual(20.0, 20.0),
    "winograd": Factor(1.0, 0.2),
    "winograd_data": Factor(1.0, 0.3),
    "winograd_weights": Factor(1.0, 0.4),
}
_FUSED = {"winograd_fused": Factor(0.9, 0.2)}
_ZEROS = {"relayout": Usual(1.0, 0.5)}
_STRIDED = {"strided": Usual(0.6, 0.2, 1.0)}
_KERNELS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gemm": {
        "t4 fp16": {"splits": 64},
        "t4 fp32": {"splits": 1},
        "t4 int8": {"splits": 4},
        "v100 fp16": {"splits": 64},
        "v100 fp32": {"splits": 16},
    },
    "output": {
        "t4 fp16": {"smallest": 64, "splits": 1},
        "t4 fp32": {"splits": 1},
        "t4 int8": {"smallest": 64, "splits": 1},
        "v100 fp16": {"smallest": 64, "splits": 64},
        "v100 fp32": {"pointwise": 64, "splits": 1},
    },
    "input_gradient": {
        "t4 fp16": {"smallest": 64, "splits": 1},
        "t4 fp32": {"smallest": 64, "pointwise": 32, "splits": 1},
        "v100 fp16": {"smallest": 64, "splits": 1},
        "v100 fp32": {"pointwise": 64, "splits": 1},
    },
    "weight_gradient": {
        "t4 fp16": {"smallest": 128, "splits": 16, "tallest": True, "places": 32},
        "t4 fp32": {"pointwise": 128, "splits": 64, "places": 32},
        "v100 fp16": {"smallest": 64, "splits": 64, "tallest": True},
        "v100 fp32": {"pointwise": 128, "splits": 64, "places": 32, "winograd_smallest": 128},
    },
}
"""Tile parameters of a library's kernels, by product, device and format.

They were chosen by inspecting the times of all shapes, and are not fitted.
"""
_ALIGNED = {"fp16": 8, "bf16": 8, "tf32": 4, "int8": 4, "fp8": 16}


@dataclass(frozen=True)
class Part:
    """Points of one device: its index, point indices, machine, shapes [sides, points], layouts."""

    device: int
    indices: NDArray[np.int_]
    machine: RooflineMachine
    sides: Numbers
    layouts: Sequence[str]


@dataclass(frozen=True)
class Problem:
    """Fit of one product in one format: each device has its own constants."""

    points: Sequence[Point]
    devices: tuple[str, ...]

    @property
    def product(self) -> Any:
        return self.points[0].product

    @property
    def precision(self) -> str:
        return self.points[0].precision

    def usual(self) -> Mapping[str, Usual]:
        if self.product == "gemm":
            return _TILES | _GEMM
        strided = self.product == "input_gradient"
        constants = _TILES | _CONVOLUTION | (_STRIDED if strided else {})
        if precision(self.precision) is not FP32:
            constants |= _TENSOR_CORES | (_LAID_OUT if strided else {})
            return constants | (_PADDED if self.product != "output" else {})
        constants |= _FP32 | (_ZEROS if strided else {})
        return constants | (_FUSED if self.product != "weight_gradient" else {})

    def constants(self, away: Numbers, device: int) -> Tiles:
        per_device: dict[str, Any] = {
            name: usual.at(far)
            for (name, usual), far in zip(self.usual().items(), away[device], strict=True)
        }
        per_device |= _KERNELS[self.product].get(f"{self.devices[device]} {self.precision}", {})
        if self.product != "gemm":
            per_device["step"] = 8 if precision(self.precision) is FP32 else 32
            return ConvolutionSpec(**per_device, source="a fit")
        layouts = {name: per_device.pop(name) for name in ("tn", "nt")}
        return Tiles(
            **per_device, alignment=_ALIGNED.get(self.precision, 1), layouts=layouts, source="a fit"
        )

    def parts(self, points: Sequence[Point]) -> list[Part]:
        """Return the points, grouped by device."""
        result = []
        for number, device in enumerate(self.devices):
            indices = np.array(
                [index for index, point in enumerate(points) if point.device == device], dtype=int
            )
            if len(indices):
                sides = np.array([points[index].shape for index in indices], dtype=float).T
                layouts = [points[index].layout for index in indices]
                result.append(
                    Part(
                        number, indices, devices.get(device).machine(self.precision), sides, layouts
                    )
                )
        return result

    def reckon(self, away: Numbers, parts: Sequence[Part]) -> Numbers:
        """Return the logarithms of the predicted seconds of all points."""
        seconds, fmt = np.zeros(sum(len(part.indices) for part in parts)), precision(self.precision)
        width = fmt.dtype.itemsize
        for part in parts:
            by = self.constants(away, part.device)
            if isinstance(by, ConvolutionSpec):
                shape = GemmShape.of(*part.sides)
                predicted = convolved(by, part.machine, shape, self.product, width, fmt is not FP32)
            else:
                result = 4 if fmt.kind == "integer" else width
                m, n, k = part.sides
                predicted = multiplied(by, part.machine, m, n, k, part.layouts, width, result)
            seconds[part.indices] = predicted
        return np.log(seconds)


@dataclass(frozen=True)
class Fitted:
    """Fitted constants of a problem."""

    problem: Problem
    away: Numbers

    def seconds(self, points: Sequence[Point]) -> Numbers:
        return np.exp(self.problem.reckon(self.away, self.problem.parts(points)))

    def of(self, device: str) -> dict[str, Any]:
        """Return the constants of one device, as in its catalog file."""
        by = self.problem.constants(self.away, self.problem.devices.index(device))
        return {name: getattr(by, name) for name in by.__dataclass_fields__ if name != "source"}


def fit(points: Sequence[Point], steps: int = 15, tries: int = 3) -> Fitted:
    """Return the constants that minimize the error on `points`, regularized towards the priors."""
    problem = Problem(points, tuple(sorted({point.device for point in points})))
    parts = problem.parts(points)
    fitting = Fitting(
        lambda away: problem.reckon(away, parts),
        np.log([point.seconds for point in points]),
        np.array([problem.devices.index(point.device) for point in points]),
        len(problem.devices),
        len(problem.usual()),
    )
    return Fitted(problem, fitting.best(steps, tries))
