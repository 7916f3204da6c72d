"""Operators whose derivative jumps: noise in front of them flips gates, which no second derivative sees.

Where an element lies at a distance z from the place of the jump and noise there has the standard deviation s, the gate flips with the
probability Phi(-z / s) and changes the gradient that passes by the height of the jump times what comes in, c in the square. So the error of
the gradients is F(s) = sum c Phi(-z / s), which grows with s and not with s**2: QSync's proposition 1, by which gradients stay unbiased,
holds for smooth networks alone.

Invariant: F is kept as a histogram of c over z, four bins an octave, so that layers of any size cost the same to keep and to evaluate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from qsync_fx.graph.fx_utils import filled

_LOWEST, _BINS, _OCTAVE = -40, 256, 4

Jump = tuple[Tensor, float, float]
Kinks = Callable[[dict[str, Any]], list[tuple[float, float]]]


def _at_zero(arguments: dict[str, Any]) -> list[tuple[float, float]]:
    return [(0.0, 1.0)]


_KINKS: dict[str, Kinks] = {
    "relu": _at_zero,
    "relu6": lambda value: [(0.0, 1.0), (6.0, 1.0)],
    "leaky_relu": lambda value: [(0.0, 1.0 - float(value["negative_slope"]))],
    "threshold": lambda value: [(float(value["threshold"]), 1.0)],
    "hardtanh": lambda value: [(float(value["min_val"]), 1.0), (float(value["max_val"]), 1.0)],
    "clamp_min": lambda value: (
        [(float(value["min"]), 1.0)] if isinstance(value["min"], (int, float)) else []
    ),
    "hardswish": lambda value: [(-3.0, 0.5), (3.0, 0.5)],
    "hardsigmoid": lambda value: [(-3.0, 1 / 6), (3.0, 1 / 6)],
    "abs": lambda value: [(0.0, 2.0)],
}
"""Where the derivative of an operator jumps, and by how much."""

_POOLS: dict[str, Any] = {
    "max_pool1d": F.max_pool1d,
    "max_pool2d": F.max_pool2d,
    "max_pool3d": F.max_pool3d,
}
_POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


@dataclass(eq=False)
class NonsmoothOperator:
    """One such operator in one run.

    Attributes:
        name: tells it from the others of the model.
        entry: of the gradient of what it reads.
        exit: of the gradient of what it gives.
        numel: elements that noise in front of it may move.
        places: for each jump, the bin of every element, the jump's height, and where it is.
        rivals: of a maximum, where the largest and the second largest of each window stand.
        reads: the number of the call whose result it reads as it is; None where something is computed between.
    """

    name: str
    entry: GradientEdge
    exit: GradientEdge
    numel: int
    places: list[Jump]
    rivals: tuple[Tensor, Tensor] | None = None
    reads: int | None = None

    def weights(self, slope: Tensor, incoming: Tensor) -> Tensor:
        """Returns what the flip of each element does, for a jump of height 1.

        Args:
            slope: what a gradient at `entry` does to the sum that gradients are probed with.
            incoming: the gradient at `exit`.
        """
        if self.rivals is not None:
            first, second = (
                slope.flatten(-self._spread).gather(-1, index.flatten(-self._spread))
                for index in self.rivals
            )
            slope = (first - second).view_as(incoming)
        return (incoming.double() * slope.double()).square()

    def histogram(self, weights: Tensor) -> Tensor:
        """Returns c by bins."""
        result = torch.zeros(_BINS, dtype=torch.float64)
        for bins, height, _ in self.places:
            result += (
                torch.bincount(bins.flatten().long(), weights.flatten(), _BINS).cpu() * height**2
            )
        result[-1] = 0.0  # what noise does not reach
        return result

    @property
    def _spread(self) -> int:
        assert self.rivals is not None
        return self.rivals[0].dim() - 2


@dataclass
class Flips:
    """The error of gradients at one gate as a function of the noise in front of it."""

    mass: Tensor = field(default_factory=lambda: torch.zeros(_BINS, dtype=torch.float64))

    def at(self, deviation: float) -> float:
        """Returns F at a standard deviation."""
        if deviation <= 0:
            return 0.0
        middle = torch.exp2((torch.arange(_BINS, dtype=torch.float64) + 0.5) / _OCTAVE + _LOWEST)
        return float((self.mass * torch.special.ndtr(-middle / deviation)).sum())


def gate(
    node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, list[Jump], Any] | None:
    """Returns what is to be known of a gate before it runs: what it reads, `Gate.places` and `Gate.rivals`; None for another operator."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = target._schema.name.removeprefix("aten::").rstrip("_")
    if name not in _KINKS and name not in _POOLS:
        return None
    inputs = filled(target, args, kwargs)
    x = next(iter(inputs.values()))
    if not isinstance(x, Tensor) or not x.requires_grad or not torch.is_grad_enabled():
        return None
    value = x.detach()
    if name in _POOLS:
        places, rivals = _rivals(_POOLS[name], value, inputs)
        return x, places, rivals
    return (
        x,
        [(_bins(value - index), height, index) for index, height in _KINKS[name](inputs)],
        None,
    )


def _rivals(
    pool: Any, x: Tensor, value: dict[str, Any]
) -> tuple[list[Jump], tuple[Tensor, Tensor]]:
    """Of each window the distance of its two largest values, in units of one's noise, and where they are."""
    settings = {name: value[name] for name in _POOLING}
    settings["stride"] = settings["stride"] or None
    largest, first = pool(x, **settings, return_indices=True)
    spread = first.dim() - 2
    rest = x.flatten(-spread).scatter(-1, first.flatten(-spread), -torch.inf).view_as(x)
    next_largest, second = pool(rest, **settings, return_indices=True)
    gap = (largest - next_largest) / math.sqrt(2)
    # What is equal is so by what stands before, as where gates have closed both: noise moves neither.
    bins = torch.where((gap > 0) & gap.isfinite(), _bins(gap), _BINS - 1).to(torch.uint8)
    return [(bins, 1.0, 0.0)], (first, second)


def _bins(distance: Tensor) -> Tensor:
    """Returns the bin of each distance, one byte an element."""
    result = ((torch.log2(distance.abs().float()) - _LOWEST) * _OCTAVE).floor()
    return (
        result.nan_to_num(nan=_BINS - 1, posinf=_BINS - 1, neginf=0)
        .clamp(0, _BINS - 1)
        .to(torch.uint8)
    )
