"""QSync's indicator to the letter (equations 3 to 5, propositions 2 and 3): for comparison, not for plans.

Its variance of a float tensor takes one exponent, that of the largest element, for all elements, and one bit less of mantissa than formats
have; its variance of a product is a bound, too large by the width that is summed over; its weights by depth are those of noise received.

Invariant: nothing is corrected here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx.precision import Precision
from qsync_fx.predictor.sensitivity.grid import scale


@dataclass(frozen=True)
class Moments:
    """What equations 4 and 5 need of a tensor: its square norm, and its variance in a format, q**2 D or 2**(2e) eps**2 D."""

    square: float
    spread: float


def moments(x: Tensor, fmt: Precision) -> Moments:
    """Returns the moments of a tensor in a format."""
    value = x.detach().double()
    if fmt.kind == "integer":
        step = float(scale(value, fmt).reshape(()))
    else:
        largest = float(value.abs().max()) if value.numel() else 0.0
        exponent = float(torch.frexp(torch.tensor(largest))[1]) - 1 if largest > 0 else float(fmt.e_min)
        step = 2.0 ** (max(exponent, fmt.e_min) - (fmt.mantissa - 1))
    return Moments(float(value.square().sum()), step**2 * value.numel())


def forward(x: Moments, weight: Moments) -> float:
    """Equation 4."""
    return (weight.square * x.spread + x.square * weight.spread) / 6


def backward(x: Moments, gradient: Moments) -> float:
    """Equation 5."""
    return (gradient.square * x.spread + x.square * gradient.spread) / 6


def indicator(gamma: float, depth: int, deepest: int, of_forward: float, of_backward: float) -> float:
    """Equation 3."""
    return gamma**2 * depth * of_forward + (deepest - depth) * of_backward


def gradient_format(fmt: Precision) -> Precision:
    """What the paper rounds a gradient to: the format itself where it is a float, 16 bits under fixed point (section IV-B)."""
    return fmt if fmt.kind == "float" else fmt.gradient
