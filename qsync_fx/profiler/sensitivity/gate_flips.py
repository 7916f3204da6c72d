"""Gates right behind an operator: there it is known element by element how far its errors move what the gate reads.

A sum of small values errs by little and is near the jump at once, so that the noise of all elements together tells too much of these.

Invariant: of what is random the chance of a flip is taken, of what is not whether it flips.
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
"""Of where a gate jumps, the chance of each element to be moved past it."""


def flipping(seen: OperatorCall, errors: Sequence[Erring]) -> Flipping:
    """Returns what the errors of a call do to a gate that reads its result as it is."""
    value = seen.tensors[OUTPUT].value
    here = [one for one in errors if not one.gradient]
    random = {one.place: one.values for one in here if one.random}
    moved = _moved(seen, value, [one for one in here if not one.random and not (one.place == OUTPUT and one.ordered)])
    deviation = _variance(seen, random).sqrt() if random else None

    def chance(at: float) -> Tensor:
        if deviation is None:
            return torch.ne(value > at, moved > at).double()
        distance = torch.where(value > at, moved.double() - at, at - moved.double())
        # Where nothing moves, nothing flips.
        found: Tensor = torch.special.ndtr(-distance / deviation)
        return found.nan_to_num(nan=0.0)

    return chance


def _moved(seen: OperatorCall, value: Tensor, errors: Sequence[Erring]) -> Tensor:
    """Returns a result with the errors that are known."""
    before = [one for one in errors if one.place != OUTPUT]
    moved = value
    if before and not any(one.place == OUTPUT for one in errors):
        given: list[Any] = list(seen.given)
        for one in before:
            exact = argument_at(given, one.place)
            put(given, one.place, exact + one.values.to(exact.dtype))
        with torch.no_grad():
            found: Tensor = seen.call(given)
        moved = found
    # What computes in a narrow format inside was run in it: its result errs by all that it does.
    for one in errors:
        if one.place == OUTPUT:
            moved = moved + one.values.to(value.dtype)
    return moved


def _variance(seen: OperatorCall, random: dict[Place, Tensor]) -> Tensor:
    product, *factors = factored(seen)
    nothing = [torch.zeros_like(factor, dtype=torch.float64) for factor in factors]
    of = [random.get(place, none) for place, none in zip(seen.row.scaled, nothing, strict=True)]
    with torch.no_grad():
        return product_noise(product, *factors, *of)


def factored(seen: OperatorCall) -> tuple[Product, Tensor, Tensor]:
    """Returns an operator as a product of its two factors, without what it adds, in FP64, and the factors."""

    row = seen.row

    def product(a: Tensor, b: Tensor) -> Tensor:
        given: list[Any] = [
            _wide(v) * 0 if at in row.added and isinstance(v, Tensor) else v for at, v in enumerate(seen.given)
        ]
        for place, value in zip(row.scaled, (a, b), strict=True):
            put(given, place, _wide(value))
        found: Tensor = seen.call(given)
        return found

    first, second = (argument_at(seen.given, place) for place in row.scaled)
    return product, first, second


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value
