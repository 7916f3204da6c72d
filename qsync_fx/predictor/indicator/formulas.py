"""QSync's indicator to the letter (equations 3 to 5, propositions 2 and 3): for comparison, not for plans.

Its variance of a float tensor takes one exponent, that of the largest element, for all elements, and one bit less of mantissa than formats
have; its variance of a product is a bound, too large by the width that is summed over; its weights by depth are those of noise received.

Invariant: nothing is corrected here.

An operator's variance from how deep it stands: closed forms, for where gradients are not propagated (`profiling.statistics` does).

With operators at depths 1 to L, an error in a forward result reaches the gradients of the L - d + 1 operators from there on, and one in
an input gradient those of the d - 1 operators before: Omega = gamma**2 (L - d + 1) forward + weight gradient + (d - 1) input gradient.
QSync's equation 3 has the two weights the other way round, as it asks for the noise received at an operator and not for what it causes.

Invariant: a depth is the longest path to an operator: with residual branches the shortest one is as long as there are no operators at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from qsync_fx.formats import Precision
from qsync_fx.predictor.indicator.rounding_variance import scale

Node = TypeVar("Node", bound=Hashable)


def depths(inputs: Mapping[Node, Iterable[Node]], counted: Iterable[Node]) -> dict[Node, int]:
    """Returns the number of counted nodes on the longest path to each node, itself included.

    Args:
        inputs: what each node reads, in an order in which these come first.
    """
    owned, result = set(counted), dict[Node, int]()
    for node, before in inputs.items():
        result[node] = max((result.get(item, 0) for item in before), default=0) + (node in owned)
    return result


def omega(
    gamma: float,
    depth: int,
    deepest: int,
    forward: float,
    weight_gradient: float,
    input_gradient: float,
) -> float:
    """Returns the variance that an operator causes.

    Args:
        gamma: the derivative of the loss by its input: 1/N for a mean over N samples.
        depth, deepest: of the operator, and of the model's deepest.
        forward, weight_gradient, input_gradient: the variance of its three products, summed over elements.
    """
    return (
        gamma**2 * (deepest - depth + 1) * forward + weight_gradient + (depth - 1) * input_gradient
    )


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
        exponent = (
            float(torch.frexp(torch.tensor(largest))[1]) - 1 if largest > 0 else float(fmt.e_min)
        )
        step = 2.0 ** (max(exponent, fmt.e_min) - (fmt.mantissa - 1))
    return Moments(float(value.square().sum()), step**2 * value.numel())


def forward(x: Moments, weight: Moments) -> float:
    """Equation 4."""
    return (weight.square * x.spread + x.square * weight.spread) / 6


def backward(x: Moments, gradient: Moments) -> float:
    """Equation 5."""
    return (gradient.square * x.spread + x.square * gradient.spread) / 6


def indicator(
    gamma: float, depth: int, deepest: int, of_forward: float, of_backward: float
) -> float:
    """Equation 3."""
    return gamma**2 * depth * of_forward + (deepest - depth) * of_backward


def gradient_format(fmt: Precision) -> Precision:
    """What the paper rounds a gradient to: the format itself where it is a float, 16 bits under fixed point (section IV-B)."""
    return fmt if fmt.kind == "float" else fmt.gradient
