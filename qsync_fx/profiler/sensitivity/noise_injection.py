"""Method "injected": noise of the exact variance is added at one operator at a time.

Each draw costs one pass per operator and precision, in addition to one pass without noise. Random
errors are drawn from a normal distribution instead of the rounding's own; deterministic errors are
added exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.formats import Precision
from qsync_fx.graph import Operator
from qsync_fx.graph.fx_utils import argument_at
from qsync_fx.predictor.indicator.rounding_variance import error, noise
from qsync_fx.profiler.sensitivity.gradient_step import (
    GradientStep,
    Key,
    MethodSpec,
    square_distance,
)
from qsync_fx.profiler.tensor_capture.rounding_sites import Rounded, RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, Call, Tap, put, tapped


@dataclass(frozen=True)
class Injected:
    """Method "injected".

    Args:
        draws: passes with noise per operator, precision and step.
    """

    draws: int = 2

    def look(self, step: GradientStep) -> dict[Key, float]:
        return self.of(step, step.keys)

    def of(self, step: GradientStep, keys: Sequence[Key]) -> dict[Key, float]:
        """Return the contribution of the operators in the precisions of `keys`."""
        exact = step.gradients()
        result: dict[Key, float] = {}
        for name, precision in keys:
            change = step.changes[name][precision]
            run = tapped(
                injecting(name, change, step.generator),
                also={item.operator for item in change.following},
            )
            draws = self.draws if change.random else 1
            total = sum(square_distance(step.gradients(run), exact) for _ in range(draws))
            result[name, precision] = total / draws
        return result


def injecting(name: str, change: RoundingSite, generator: torch.Generator) -> Tap:
    """Return a tap that adds the errors of `change` to one operator."""

    following = {item.operator: item.fmt for item in change.following}

    def tap(operator: Operator, argument: list[Any], call: Call) -> Any:
        if (fmt := following.get(str(operator.id))) is not None:
            return _inside(fmt, range(len(argument)), argument, call)
        if str(operator.id) != name:
            return call(argument)
        if change.inside is not None:
            assert operator.row is not None
            return _inside(change.inside, operator.row.converted(argument), argument, call)
        changed = list(argument)
        back: dict[Any, list[Rounded]] = {}
        for item in change.rounded:
            if item.gradient:
                back.setdefault(item.place, []).append(item)
            elif item.place != OUTPUT:
                value = argument_at(changed, item.place)
                put(changed, item.place, value + _drawn(item, value, generator))
        for place, every in back.items():
            value = None if place == OUTPUT else argument_at(changed, place)
            if value is not None and value.requires_grad:
                branch = value.view_as(value)
                _hook(branch, every, generator)
                put(changed, place, branch)
        result = call(changed)
        for item in change.rounded:
            if item.place == OUTPUT and not item.gradient:
                result = result + _drawn(item, result, generator)
        if isinstance(result, Tensor) and result.requires_grad:
            _hook(result, back.get(OUTPUT, []), generator)
        return result

    return tap


def _hook(value: Tensor, every: list[Rounded], generator: torch.Generator) -> None:
    for item in every:
        value.register_hook(lambda g, item=item: g + _drawn(item, g, generator))  # type: ignore[no-untyped-call]


def _inside(fmt: Precision, places: Iterable[int], argument: list[Any], call: Call) -> Any:
    """Run an operator in a narrow format; `places` are the indices of the converted arguments."""
    narrow = list(argument)
    for index in places:
        value = narrow[index]
        narrow[index] = (
            [_narrow(item, fmt) for item in value]
            if isinstance(value, (list, tuple))
            else _narrow(value, fmt)
        )
    result = call(narrow)
    wide = next(item.dtype for item in _flat(argument) if _is_float(item))
    return result.to(wide) if isinstance(result, Tensor) else result


def _narrow(value: Any, fmt: Precision) -> Any:
    return value.to(fmt.dtype) if _is_float(value) else value


def _flat(argument: Iterable[Any]) -> Iterator[Any]:
    for value in argument:
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _drawn(item: Rounded, of: Tensor, generator: torch.Generator) -> Tensor:
    if not item.random:
        return error(of, item.fmt, item.rounding, item.keep).to(of.dtype)
    deviation = noise(of, item.fmt, item.rounding, item.keep).sqrt()
    return (
        torch.randn(of.shape, generator=generator, dtype=torch.float64).to(of.device) * deviation
    ).to(of.dtype)


METHODS: Final = (
    MethodSpec(
        "injected",
        Injected,
        "noise of the exact variance is put in at each operator in turn",
        lambda operators, precisions: 1 + 2 * operators * precisions,
    ),
)
