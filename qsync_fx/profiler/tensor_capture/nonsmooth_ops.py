"""Gates: operators whose derivative jumps, and the gradient error of flipping them.

Noise with standard deviation s flips an element at distance z from a jump with the probability
Phi(-z/s), which adds the squared change c of the gradient: F(s) = sum c Phi(-z/s). No second
derivative shows it. F is stored as a histogram of c over z with four bins per octave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from qsync_fx.graph.fx_utils import filled
from qsync_fx.torch_internals import OpOverload

_LOWEST, _BINS, _OCTAVE = -40, 256, 4

Jump = tuple[Tensor, float, float]
Kinks = Callable[[dict[str, Any]], list[tuple[float, float]]]


def _number(value: Any) -> list[tuple[float, float]]:
    return [(float(value), 1.0)] if isinstance(value, (int, float)) else []


_KINKS: dict[str, Kinks] = {
    "relu": lambda value: [(0.0, 1.0)],
    "relu6": lambda value: [(0.0, 1.0), (6.0, 1.0)],
    "leaky_relu": lambda value: [(0.0, 1.0 - float(value["negative_slope"]))],
    "threshold": lambda value: [(float(value["threshold"]), 1.0)],
    "hardtanh": lambda value: [(float(value["min_val"]), 1.0), (float(value["max_val"]), 1.0)],
    "clamp_min": lambda value: _number(value["min"]),
    "hardswish": lambda value: [(-3.0, 0.5), (3.0, 0.5)],
    "hardsigmoid": lambda value: [(-3.0, 1 / 6), (3.0, 1 / 6)],
    "abs": lambda value: [(0.0, 2.0)],
}
"""Position and height of each jump of an operator's derivative."""

_POOLS: dict[str, Any] = {f"max_pool{n}d": getattr(F, f"max_pool{n}d") for n in (1, 2, 3)}
_POOLING = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


@dataclass(eq=False)
class NonsmoothOperator:
    """A gate in one run, with the edges of the gradients of its input and output.

    Attributes:
        numel: number of elements that noise may move.
        places: for each jump, the bin of each element (uint8), the height and the position.
        rivals: for max pooling, the indices of the two largest elements of each window.
        reads: index of the call whose result it reads unchanged; None if there is none.
    """

    name: str
    entry: GradientEdge
    exit: GradientEdge
    numel: int
    places: list[Jump]
    rivals: tuple[Tensor, Tensor] | None = None
    reads: int | None = None

    def weights(self, slope: Tensor, incoming: Tensor) -> Tensor:
        """Return the effect of flipping each element, for a jump of height 1."""
        if self.rivals is not None:
            spatial = self.rivals[0].dim() - 2
            first, second = (
                slope.flatten(-spatial).gather(-1, index.flatten(-spatial)) for index in self.rivals
            )
            slope = (first - second).view_as(incoming)
        return (incoming.double() * slope.double()).square()

    def histogram(self, weights: Tensor) -> Tensor:
        result = torch.zeros(_BINS, dtype=torch.float64)
        for bins, height, _ in self.places:
            mass = torch.bincount(bins.flatten().long(), weights.flatten(), _BINS)
            result += mass.cpu() * height**2
        result[-1] = 0.0  # beyond the reach of noise
        return result


def flip_error(histogram: Tensor, deviation: float) -> float:
    """Return a gate's gradient error F for noise of a standard deviation at its input."""
    if deviation <= 0:
        return 0.0
    middle = torch.exp2((torch.arange(_BINS, dtype=torch.float64) + 0.5) / _OCTAVE + _LOWEST)
    return float((histogram * torch.special.ndtr(-middle / deviation)).sum())


def gate(
    node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, list[Jump], Any] | None:
    """Return a gate's input, `NonsmoothOperator.places` and `rivals`; None for other operators."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
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
    jumps = _KINKS[name](inputs)
    return x, [(_bins(value - position), height, position) for position, height in jumps], None


def _rivals(
    pool: Any, x: Tensor, value: dict[str, Any]
) -> tuple[list[Jump], tuple[Tensor, Tensor]]:
    """Return the gap between each window's two largest values over sqrt(2), and their indices."""
    settings = {name: value[name] for name in _POOLING}
    settings["stride"] = settings["stride"] or None
    largest, first = pool(x, **settings, return_indices=True)
    spatial = first.dim() - 2
    rest = x.flatten(-spatial).scatter(-1, first.flatten(-spatial), -torch.inf).view_as(x)
    next_largest, second = pool(rest, **settings, return_indices=True)
    gap = (largest - next_largest) / math.sqrt(2)
    # Equal values have a common cause, such as closed gates before them, and noise moves neither.
    bins = torch.where((gap > 0) & gap.isfinite(), _bins(gap), _BINS - 1).to(torch.uint8)
    return [(bins, 1.0, 0.0)], (first, second)


def _bins(distance: Tensor) -> Tensor:
    last = _BINS - 1
    result = ((torch.log2(distance.abs().float()) - _LOWEST) * _OCTAVE).floor()
    return result.nan_to_num(nan=last, posinf=last, neginf=0).clamp(0, last).to(torch.uint8)
