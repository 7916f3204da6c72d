"""Fits the constants of devices of the catalog to times of products that others measured.

Constants are searched one at a time from values that are usual, and from random ones; what is left of a convolution's times is explained
by corrections, linear in the logarithm and held small (ridge regression). The constants of one product of convolutions are those of all
devices together, but for the smallest tile and the corrections.

Invariant: nothing that is held out is looked at by a fit, and what is held out is whole shapes, on all devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qsync_fx import devices
from qsync_fx.devices.analytic.convolutions import FEATURES, Shape, uncorrected
from qsync_fx.devices.analytic.products import multiplied
from qsync_fx.devices.constants import Convolution, Tiles
from qsync_fx.precision import FP32, precision

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """One measured product.

    Attributes:
        device, precision: where, and in which format.
        product: "gemm", or which product of a convolution.
        shape: m, n, k, or the sizes of a convolution.
        layout: which factor of a matrix product is transposed.
        seconds: what it took.
    """

    device: str
    precision: str
    product: str
    shape: tuple[int, ...]
    layout: str
    seconds: float


Range = tuple[float, float]
_TILES: dict[str, tuple[float, Range]] = {
    "efficiency": (0.75, (0.1, 1.05)),
    "small_tiles": (0.4, (0.0, 1.2)),
    "latency": (40.0, (1.0, 90.0)),
    "prologue": (60.0, (0.0, 250.0)),
    "reduction": (1.0, (0.0, 4.0)),
    "memory": (0.75, (0.4, 1.0)),
    "overlap": (2.0, (1.0, 6.0)),
    "launch": (4e-6, (1e-6, 12e-6)),
}
_GEMM = {
    **_TILES,
    "throttle": (0.0, (0.0, 0.15)),
    "misaligned": (1.0, (1.0, 4.0)),
    "tn": (1.0, (0.7, 1.5)),
    "nt": (1.0, (0.7, 1.5)),
}
_CONVOLUTION = {**_TILES, "gather": (0.1, (0.0, 0.8))}
_RELAYOUT: dict[str, tuple[float, Range]] = {"relayout": (0.5, (0.0, 3.0))}
_STRIDED: dict[str, tuple[float, Range]] = {"strided": (0.8, (0.0, 1.0))}
_WINOGRAD: dict[str, tuple[float, Range]] = {
    "winograd": (0.75, (0.3, 1.0)),
    "winograd_fused": (0.6, (0.3, 1.2)),
    "winograd_weights": (1.0, (0.3, 4.0)),
    "winograd_data": (1.0, (0.3, 4.0)),
}
_EDGES = (32, 64, 128)
_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
_ALIGNED = {"fp16": 8, "int8": 4}

_SHARED, _OWN, _OFFSET = 4.0, 16.0, 0.5
"""How much corrections are held back: those that devices share, those of each, and what each device's times are all multiplied by."""
_EASY = {"window": 0.3, "strided": 0.3, "thin": 0.3, "single": 0.1, "tall": 0.3, "winograd": 0.3}
"""What is known of few shapes is held back less, for it is seldom."""

_USUAL = {"gemm": 0.05, "output": 0.05, "input_gradient": 0.3, "weight_gradient": 0.3}
"""How much constants are held to what is usual: of gradients more, whose times follow a library's choices more than work."""

Values = dict[str, float]


@dataclass(frozen=True)
class Problem:
    """Points of one product in one format, to be explained by one set of constants."""

    points: Sequence[Point]
    devices: tuple[str, ...]

    @property
    def convolution(self) -> bool:
        return self.points[0].product != "gemm"

    @property
    def precision(self) -> str:
        return self.points[0].precision

    def ranges(self) -> dict[str, tuple[float, Range]]:
        if not self.convolution:
            return _GEMM
        found = dict(_CONVOLUTION)
        if precision(self.precision) is FP32:
            found |= _WINOGRAD
        if precision(self.precision) is not FP32 or self.points[0].product == "input_gradient":
            found |= _RELAYOUT
        if self.points[0].product == "input_gradient":
            found |= _STRIDED
        return found

    def choices(self) -> dict[str, tuple[int, ...]]:
        return {"splits": _SPLITS, **{f"smallest of {device}": _EDGES for device in self.devices}}

    def constants(self, values: Values, device: str) -> Tiles:
        own: dict[str, Any] = {
            name: value for name, value in values.items() if " of " not in name and name not in ("tn", "nt")
        }
        own |= {"splits": int(own["splits"]), "smallest": int(values[f"smallest of {device}"]), "source": "a fit"}
        own["step"] = 8 if precision(self.precision) is FP32 and self.convolution else 32
        if self.convolution:
            return Convolution(**own)
        own["alignment"] = _ALIGNED.get(self.precision, 1)
        return Tiles(**own, layouts={name: values[name] for name in ("tn", "nt")})

    def reckon(self, values: Values, points: Sequence[Point]) -> tuple[Numbers, Numbers]:
        """Returns the logarithms of reckoned seconds before corrections, and the features of each point."""
        seconds, features = np.zeros(len(points)), np.zeros((len(points), len(FEATURES)))
        fmt = precision(self.precision)
        for device in self.devices:
            at = np.array([index for index, point in enumerate(points) if point.device == device], dtype=int)
            if not len(at):
                continue
            machine = devices.get(device).machine(self.precision)
            by = self.constants(values, device)
            sides = np.array([points[index].shape for index in at], dtype=float).T
            if isinstance(by, Convolution):
                product: Any = self.points[0].product
                shape = Shape.of(*sides)
                found, about = uncorrected(by, machine, shape, product, fmt.dtype.itemsize, fmt is not FP32)
                features[at] = np.stack([about[name] for name in FEATURES], 1)
            else:
                layouts = [points[index].layout for index in at]
                result = 4 if fmt.kind == "integer" else fmt.dtype.itemsize
                found = multiplied(by, machine, sides[0], sides[1], sides[2], layouts, fmt.dtype.itemsize, result)
            seconds[at] = found
        return np.log(seconds), features

    def design(self, features: Numbers, points: Sequence[Point]) -> Numbers:
        own = [features * np.array([[point.device == device] for point in points]) for device in self.devices]
        return np.concatenate([features * (np.array(FEATURES) != "all"), *own], 1)

    def held_back(self) -> Numbers:
        easy = np.array([_EASY.get(name, 1.0) for name in FEATURES])
        offset = np.array(FEATURES) == "all"
        return np.concatenate([_SHARED * easy, *(np.where(offset, _OFFSET, _OWN * easy) for _ in self.devices)])


@dataclass(frozen=True)
class Fitted:
    """Constants that explain a problem, and the corrections beside them."""

    problem: Problem
    values: Values
    corrections: Numbers

    def seconds(self, points: Sequence[Point]) -> Numbers:
        reckoned, features = self.problem.reckon(self.values, points)
        return np.asarray(np.exp(reckoned + self.problem.design(features, points) @ self.corrections))

    def of(self, device: str) -> dict[str, Any]:
        """Returns the constants of one device, as its file has them."""
        by = self.problem.constants(self.values, device)
        found = {name: getattr(by, name) for name in by.__dataclass_fields__ if name not in ("source", "corrections")}
        count = len(FEATURES)
        at = count * (1 + self.problem.devices.index(device))
        shared = self.corrections[:count] * (np.array(FEATURES) != "all")
        if self.problem.convolution:
            both = shared + self.corrections[at : at + count]
            found["corrections"] = {name: float(v) for name, v in zip(FEATURES, both, strict=True) if abs(v) >= 5e-4}
        return found


def fit(points: Sequence[Point], rounds: int = 12, starts: int = 2) -> Fitted:
    """Returns the constants that explain points best, without straying far from what is usual."""
    problem = Problem(points, tuple(sorted({point.device for point in points})))
    measured = np.log([point.seconds for point in points])
    weights = problem.held_back()
    ranges, choices = problem.ranges(), problem.choices()

    def corrections(values: Values) -> tuple[float, Numbers]:
        reckoned, features = problem.reckon(values, points)
        left = measured - reckoned
        if not problem.convolution:
            return _loss(left), np.zeros(len(weights))
        design = problem.design(features, points)
        found = _ridge(design, left, weights)
        return _loss(left - design @ found) + 0.05 * float(weights @ found**2) / len(left), found

    def loss(values: Values) -> float:
        far = [(values[name] - start) / (high - low) for name, (start, (low, high)) in ranges.items()]
        return corrections(values)[0] + _USUAL[points[0].product] * float(np.mean(np.square(far)))

    random = np.random.default_rng(0)
    usual: Values = {name: start for name, (start, _) in ranges.items()}
    usual |= {name: float(options[len(options) // 2]) for name, options in choices.items()}
    best, best_loss = usual, float("inf")
    for start in range(starts):
        drawn = [usual] if start == 0 else [_drawn(random, ranges, choices) for _ in range(25)]
        values, value = min(((one, loss(one)) for one in drawn), key=lambda found: found[1])
        values, value = _search(values, value, loss, ranges, choices, random, rounds)
        if value < best_loss:
            best, best_loss = values, value
    return Fitted(problem, best, corrections(best)[1])


def _search(
    values: Values, value: float, loss: Any, ranges: Any, choices: Any, random: Any, rounds: int
) -> tuple[Values, float]:
    """Moves one constant at a time, by steps that grow where they help and shrink where they do not."""
    steps = {name: 0.2 * (high - low) for name, (_, (low, high)) in ranges.items()}
    for _ in range(rounds):
        for name in random.permutation([*ranges, *choices]):
            if name in choices:
                tried = [float(option) for option in choices[name]]
            else:
                low, high = ranges[name][1]
                tried = [float(np.clip(values[name] + sign * steps[name], low, high)) for sign in (1, -1)]
            for option in tried:
                if option == values[name]:
                    continue
                other = {**values, str(name): option}
                if (found := loss(other)) < value - 1e-6:
                    values, value = other, found
                    if name in steps:
                        steps[name] *= 1.3
                    break
            else:
                if name in steps:
                    steps[name] *= 0.5
    return values, value


def _drawn(random: Any, ranges: Mapping[str, tuple[float, Range]], choices: Mapping[str, tuple[int, ...]]) -> Values:
    drawn = {name: float(random.uniform(*bounds)) for name, (_, bounds) in ranges.items()}
    return drawn | {name: float(random.choice(options)) for name, options in choices.items()}


def _loss(left: Numbers) -> float:
    return float(np.mean(np.sqrt(left**2 + 0.03**2) - 0.03))


def _ridge(design: Numbers, left: Numbers, weights: Numbers) -> Numbers:
    """Returns coefficients that explain what is left, few large errors counting no more than their size."""
    trust = np.ones(len(left))
    found: Numbers = np.zeros(design.shape[1])
    for _ in range(4):
        weighted = design.T * trust
        found = np.asarray(np.linalg.solve(weighted @ design + np.diag(weights), weighted @ left), dtype=np.float64)
        trust = 0.05 / np.sqrt((left - design @ found) ** 2 + 0.05**2)
    return found
