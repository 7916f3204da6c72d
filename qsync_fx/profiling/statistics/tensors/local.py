"""What one call of an operator errs by in a precision: of each tensor that it rounds the variance or, where nothing is random, the error.

Products round what they read and what they give, which formulas tell of the tensors alone. A norm or a softmax computes on in the narrow
format inside, in as many roundings as its kernel has, and so does what the cascade makes narrow: these are run in that format, on the
tensors at hand, and compared.

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
from qsync_fx.profiling.statistics.tensors.following import Follower
from qsync_fx.profiling.statistics.tensors.roundings import Change
from qsync_fx.profiling.statistics.tensors.taps import OUTPUT, Seen, put


@dataclass(frozen=True)
class Erring:
    """
    Attributes:
        place: of the tensor.
        gradient: whether it is its gradient that errs.
        values: of each element the variance, or the error where nothing is random.
        random: which of the two.
        ordered: whether it is that of one rounding to nearest, which moves nothing past a value of the format's grid.
    """

    place: Place
    gradient: bool
    values: Tensor
    random: bool
    ordered: bool = False

    @property
    def square(self) -> Tensor:
        """The expected square of each element's error."""
        return self.values if self.random else self.values.square()


def erring(
    seen: Seen, change: Change, gradients: Mapping[Place, Tensor], handed: Precision | None = None
) -> list[Erring]:
    """Returns what errs in a call of an operator.

    Args:
        gradients: of its tensors, by place, those that have one.
        handed: what the gradient of its result is in when it gets there, by whoever follows, who errs by that.
    """
    if change.inside is not None:
        return _measured(seen, change.inside, gradients, handed)
    found = []
    for one in change.rounded:
        tapped = seen.tensors.get(one.place)
        of = gradients.get(one.place) if one.gradient else None if tapped is None else tapped.value
        if of is not None and not (one.gradient and one.place == OUTPUT and one.fmt == handed):
            errs = noise if one.random else error
            values = errs(of, one.fmt, one.rounding, one.keep)
            found.append(Erring(one.place, one.gradient, values, one.random, one.rounding == "nearest"))
    return found


def erring_behind(seen: Seen, follower: Follower, gradients: Mapping[Place, Tensor]) -> list[Erring]:
    """Returns what errs in a call of an operator that computes in a narrow format as what it reads is narrow: beside that."""
    incoming, fmt = gradients.get(OUTPUT), follower.fmt
    if incoming is None:
        return []
    rounded = incoming.to(fmt.dtype).to(incoming.dtype)
    narrow = _run(seen, rounded, lambda t: t, lambda t, place: t.to(fmt.dtype))
    exact = _run(seen, rounded, lambda t: t.to(fmt.dtype).to(t.dtype), lambda t, place: t)
    found = _differences(narrow, exact)
    if follower.leaves:
        found.append(Erring(OUTPUT, True, error(incoming, fmt, "nearest"), random=False))
    return found


def _measured(seen: Seen, fmt: Precision, gradients: Mapping[Place, Tensor], handed: Precision | None) -> list[Erring]:
    incoming = gradients.get(OUTPUT)
    if incoming is None:
        return []
    if handed is not None:
        incoming = incoming.to(handed.dtype).to(incoming.dtype)
    exact = _run(seen, incoming, lambda t: t, lambda t, place: t)
    # Only the tensor that the plan converts is narrow; parameters and statistics keep their format, as the backend has it.
    narrow = _run(seen, incoming, lambda t: t, lambda t, place: t.to(fmt.dtype) if place in seen.converted else t)
    return _differences(narrow, exact)


def _differences(narrow: Mapping[Place, Tensor], exact: Mapping[Place, Tensor]) -> list[Erring]:
    """An operator's result errs in itself, and what it reads in the gradient."""
    return [
        Erring(place, place != OUTPUT, narrow[place].double() - one.double(), random=False)
        for place, one in exact.items()
    ]


def _run(
    seen: Seen, incoming: Tensor, before: Callable[[Tensor], Tensor], change: Callable[[Tensor, Place], Tensor]
) -> dict[Place, Tensor]:
    """Returns an operator's result and the gradients of what it reads: `before` of its tensors, of which it gets what `change` makes."""
    given: list[Any] = [v.clone() if isinstance(v, Tensor) else v for v in seen.given]
    leaves: dict[Place, Tensor] = {}
    with torch.enable_grad():
        for place in seen.tensors.keys() - {OUTPUT}:
            value = argument_at(given, place)
            leaves[place] = before(value.detach()).requires_grad_()
            put(given, place, change(leaves[place], place))
        result: Tensor = seen.call(given)
        used = list(leaves)
        found = torch.autograd.grad(result, [leaves[p] for p in used], incoming.to(result.dtype), allow_unused=True)
    return {OUTPUT: result.detach()} | {p: g for p, g in zip(used, found, strict=True) if g is not None}
