"""What one call of an operator errs by in a precision: of each tensor that it rounds the variance or, where nothing is random, the error.

Products round what they read and what they give, which formulas tell of the tensors alone. A norm or a softmax computes on in the narrow
format inside, in as many roundings as its kernel has: it is run in that format, on the tensors at hand, and compared.

Invariant: looks at one operator, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsync_fx.graph.nodes import argument_at
from qsync_fx.ops import Place
from qsync_fx.precision import Precision
from qsync_fx.predictor.sensitivity.rounding_noise import error, noise
from qsync_fx.profiling.statistics.roundings import Change
from qsync_fx.profiling.statistics.taps import OUTPUT, Seen, put


@dataclass(frozen=True)
class Erring:
    """
    Attributes:
        place: of the tensor.
        gradient: whether it is its gradient that errs.
        values: of each element the variance, or the error where nothing is random.
        random: which of the two.
    """

    place: Place
    gradient: bool
    values: Tensor
    random: bool

    @property
    def square(self) -> Tensor:
        """The expected square of each element's error."""
        return self.values if self.random else self.values.square()


def erring(seen: Seen, change: Change, gradients: Mapping[Place, Tensor]) -> list[Erring]:
    """Returns what errs in a call of an operator.

    Args:
        gradients: of its tensors, by place, those that have one.
    """
    if change.inside is not None:
        return _measured(seen, change.inside, gradients)
    found = []
    for one in change.rounded:
        tapped = seen.tensors.get(one.place)
        of = gradients.get(one.place) if one.gradient else None if tapped is None else tapped.value
        if of is not None:
            errs = noise if one.random else error
            found.append(Erring(one.place, one.gradient, errs(of, one.fmt, one.rounding, one.keep), one.random))
    return found


def _measured(seen: Seen, fmt: Precision, gradients: Mapping[Place, Tensor]) -> list[Erring]:
    incoming = gradients.get(OUTPUT)
    if incoming is None:
        return []
    first = _run(seen, incoming, lambda t, at: t)
    # Only the tensor that the plan converts is narrow; parameters and statistics keep their format, as the backend has it.
    narrow = _run(seen, incoming, lambda t, at: t.to(fmt.dtype) if at in seen.converted else t)
    found = []
    for place, exact in first.items():
        found.append(Erring(place, place != OUTPUT, (narrow[place].double() - exact.double()), random=False))
    return found


def _run(seen: Seen, incoming: Tensor, change: Callable[[Tensor, Place], Tensor]) -> dict[Place, Tensor]:
    """Returns an operator's result and the gradients of what it reads."""
    given: list[Any] = [v.clone() if isinstance(v, Tensor) else v for v in seen.given]
    leaves: dict[Place, Tensor] = {}
    with torch.enable_grad():
        for place in seen.tensors.keys() - {OUTPUT}:
            value = argument_at(given, place)
            leaves[place] = value.detach().requires_grad_()
            put(given, place, change(leaves[place], place))
        result: Tensor = seen.call(given)
        used = list(leaves)
        found = torch.autograd.grad(result, [leaves[p] for p in used], incoming.to(result.dtype), allow_unused=True)
    return {OUTPUT: result.detach()} | {p: g for p, g in zip(used, found, strict=True) if g is not None}
