"""The method "injected": noise of the exact variance is put in at one operator, and the gradients are compared.

Invariant: one pass an operator and precision beside one without noise. What is random is drawn from a normal distribution, whatever a
rounding's own is; errors that are not random are put in as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsync_fx.formats import Precision
from qsync_fx.graph import Operator
from qsync_fx.graph.fx_utils import argument_at
from qsync_fx.predictor.indicator.rounding_variance import error, noise
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, square_distance
from qsync_fx.profiler.tensor_capture.rounding_sites import Rounded, RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, Call, Tap, put, tapped


@dataclass(frozen=True)
class Injected:
    """
    Args:
        draws: passes with noise an operator, precision and step.
    """

    draws: int = 2

    def look(self, step: GradientStep) -> dict[Key, float]:
        return self.of(step, step.keys)

    def of(self, step: GradientStep, keys: Sequence[Key]) -> dict[Key, float]:
        """Returns what some operators add in some precisions."""
        exact = step.gradients()
        found: dict[Key, float] = {}
        for name, precision in keys:
            change = step.changes[name][precision]
            run = tapped(injecting(name, change, step.generator), also={one.operator for one in change.following})
            draws = self.draws if change.random else 1
            total = sum(square_distance(step.gradients(run), exact) for _ in range(draws))
            found[name, precision] = total / draws
        return found


def injecting(name: str, change: RoundingSite, generator: torch.Generator) -> Tap:
    """Returns a tap that lets an operator err as it does where `change` is true of it."""

    following = {one.operator: one.fmt for one in change.following}

    def tap(operator: Operator, given: list[Any], call: Call) -> Any:
        if (fmt := following.get(str(operator.id))) is not None:
            return _inside(fmt, range(len(given)), given, call)
        if str(operator.id) != name:
            return call(given)
        if change.inside is not None:
            assert operator.row is not None
            return _inside(change.inside, operator.row.converted(given), given, call)
        changed = list(given)
        back: dict[Any, list[Rounded]] = {}
        for one in change.rounded:
            if one.gradient:
                back.setdefault(one.place, []).append(one)
            elif one.place != OUTPUT:
                value = argument_at(changed, one.place)
                put(changed, one.place, value + _drawn(one, value, generator))
        for place, every in back.items():
            value = None if place == OUTPUT else argument_at(changed, place)
            if value is not None and value.requires_grad:
                branch = value.view_as(value)
                _hook(branch, every, generator)
                put(changed, place, branch)
        result = call(changed)
        for one in change.rounded:
            if one.place == OUTPUT and not one.gradient:
                result = result + _drawn(one, result, generator)
        if isinstance(result, Tensor) and result.requires_grad:
            _hook(result, back.get(OUTPUT, []), generator)
        return result

    return tap


def _hook(value: Tensor, every: list[Rounded], generator: torch.Generator) -> None:
    for one in every:
        value.register_hook(lambda g, one=one: g + _drawn(one, g, generator))  # type: ignore[no-untyped-call]


def _inside(fmt: Precision, places: Iterable[int], given: list[Any], call: Call) -> Any:
    """Runs an operator in a narrow format, as a plan would; `places` are the arguments that are converted."""
    narrow = list(given)
    for at in places:
        value = narrow[at]
        narrow[at] = [_narrow(one, fmt) for one in value] if isinstance(value, (list, tuple)) else _narrow(value, fmt)
    result = call(narrow)
    wide = next(one.dtype for one in _flat(given) if _is_float(one))
    return result.to(wide) if isinstance(result, Tensor) else result


def _narrow(value: Any, fmt: Precision) -> Any:
    return value.to(fmt.dtype) if _is_float(value) else value


def _flat(given: Iterable[Any]) -> Iterator[Any]:
    for value in given:
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _drawn(one: Rounded, of: Tensor, generator: torch.Generator) -> Tensor:
    """Returns an error of each element of a tensor."""
    if not one.random:
        return error(of, one.fmt, one.rounding, one.keep).to(of.dtype)
    deviation = noise(of, one.fmt, one.rounding, one.keep).sqrt()
    return (torch.randn(of.shape, generator=generator, dtype=torch.float64).to(of.device) * deviation).to(of.dtype)
