"""Probabilities that an operator's errors flip the gate directly behind it.

The noise in front of a gate correlates with its input: a sum of small values has small errors, and
is near the jump. So the distribution over all elements overestimates the flips, and the error of
each element is used instead: the probability of a flip for random errors, and the flip itself for
known ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_fx.graph.fx_utils import argument_at
from qsync_fx.ops import Place
from qsync_fx.predictor.indicator.rounding_variance import Product, product_noise
from qsync_fx.profiler.tensor_capture.gradient_probes import Erring
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, OperatorCall, put

Flipping = Callable[[float], Tensor]
"""From the position of a jump to the probability that each element crosses it."""


def flipping(observed: OperatorCall, errors: Sequence[Erring]) -> Flipping:
    """Return the flip probabilities of a gate that reads a call's result unchanged."""
    value = observed.tensors[OUTPUT].value
    current = [item for item in errors if not item.gradient]
    random = {item.place: item.values for item in current if item.random}
    moved = _moved(
        observed,
        value,
        [
            item
            for item in current
            if not item.random and not (item.place == OUTPUT and item.ordered)
        ],
    )
    deviation = _variance(observed, random).sqrt() if random else None

    def chance(index: float) -> Tensor:
        if deviation is None:
            return torch.ne(value > index, moved > index).double()
        distance = torch.where(value > index, moved.double() - index, index - moved.double())
        # Without noise, 0 / 0 is NaN; the probability is 0.
        result: Tensor = torch.special.ndtr(-distance / deviation)
        return result.nan_to_num(nan=0.0)

    return chance


def _moved(observed: OperatorCall, value: Tensor, errors: Sequence[Erring]) -> Tensor:
    before = [item for item in errors if item.place != OUTPUT]
    moved = value
    if before and not any(item.place == OUTPUT for item in errors):
        inputs: list[Any] = list(observed.given)
        for item in before:
            exact = argument_at(inputs, item.place)
            put(inputs, item.place, exact + item.values.to(exact.dtype))
        with torch.no_grad():
            result: Tensor = observed.call(inputs)
        moved = result
    # Errors of operators that compute in a narrow format are measured at the output, and complete.
    for item in errors:
        if item.place == OUTPUT:
            moved = moved + item.values.to(value.dtype)
    return moved


def _variance(observed: OperatorCall, random: dict[Place, Tensor]) -> Tensor:
    product, *factors = factored(observed)
    nothing = [torch.zeros_like(factor, dtype=torch.float64) for factor in factors]
    of = [random.get(place, none) for place, none in zip(observed.row.scaled, nothing, strict=True)]
    with torch.no_grad():
        return product_noise(product, *factors, *of)


def factored(observed: OperatorCall) -> tuple[Product, Tensor, Tensor]:
    """Return an operator without its bias as a product of two factors in FP64, and the factors."""

    row = observed.row

    def product(a: Tensor, b: Tensor) -> Tensor:
        inputs: list[Any] = [
            _wide(v) * 0 if index in row.added and isinstance(v, Tensor) else v
            for index, v in enumerate(observed.given)
        ]
        for place, value in zip(row.scaled, (a, b), strict=True):
            put(inputs, place, _wide(value))
        result: Tensor = observed.call(inputs)
        return result

    first, second = (argument_at(observed.given, place) for place in row.scaled)
    return product, first, second


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
