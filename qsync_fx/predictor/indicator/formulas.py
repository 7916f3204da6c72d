"""Closed forms of QSync's indicator, Eq. (3) to (5), literally.

They serve for comparison, not for plans. For a float tensor they use one exponent, of the largest
element, and one mantissa bit less than the format has. Their variance of a product is an upper
bound, too large by a factor of the reduced dimension.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from qsync_fx.formats import Precision
from qsync_fx.predictor.indicator.rounding_variance import scale

Node = TypeVar("Node", bound=Hashable)


def depths(inputs: Mapping[Node, Iterable[Node]], counted: Iterable[Node]) -> dict[Node, int]:
    """Return the number of counted nodes on the longest path to each node, including the node.

    A residual branch counts with the longest path. The order of `inputs` is topological.
    """
    owned, result = set(counted), dict[Node, int]()
    for node, before in inputs.items():
        result[node] = max((result.get(item, 0) for item in before), default=0) + (node in owned)
    return result


@dataclass(frozen=True)
class Moments:
    """Square norm of a tensor, and 6 times its variance in a format (QSync).

    With D elements, `spread` is q**2 D for integers, 2**(2e) eps**2 D for floats.
    """

    square: float
    spread: float


def moments(x: Tensor, fmt: Precision) -> Moments:
    """Return the moments of a tensor in a format."""
    value = x.detach().double()
    if fmt.kind == "integer":
        step = float(scale(value, fmt).reshape(()))
    else:
        exponent = fmt.e_min
        if value.any():
            exponent = max(exponent, math.frexp(float(value.abs().max()))[1] - 1)
        step = 2.0 ** (exponent - (fmt.mantissa - 1))
    return Moments(float(value.square().sum()), step**2 * value.numel())


def forward(x: Moments, weight: Moments) -> float:
    """Return the variance of a forward product: QSync, Eq. (4)."""
    return (weight.square * x.spread + x.square * weight.spread) / 6


def backward(x: Moments, gradient: Moments) -> float:
    """Return the variance of a backward product: QSync, Eq. (5)."""
    return (gradient.square * x.spread + x.square * gradient.spread) / 6


def indicator(
    gamma: float, depth: int, deepest: int, of_forward: float, of_backward: float
) -> float:
    """Return the indicator of an operator: QSync, Eq. (3)."""
    return gamma**2 * depth * of_forward + (deepest - depth) * of_backward


def gradient_format(fmt: Precision) -> Precision:
    """Return the format of a gradient: `fmt` for floats, 16 bits for fixed point (QSync, IV-B)."""
    return fmt if fmt.kind == "float" else fmt.gradient
