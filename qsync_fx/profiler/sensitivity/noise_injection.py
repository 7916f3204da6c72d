"""Method "injected": noise of the exact variance is added at one operator at a time.

Random errors are drawn from a normal distribution; deterministic errors are added exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.formats import Precision
from qsync_fx.graph import Operator
from qsync_fx.graph.fx_utils import argument_at
from qsync_fx.predictor.indicator.rounding_variance import error, noise
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, MethodSpec
from qsync_fx.profiler.tensor_capture.rounding_sites import Rounded, RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import (
    OUTPUT,
    Call,
    Tap,
    is_floating,
    put,
    tapped,
)
from qsync_fx.torch_internals import tree_leaves, tree_map_only


@dataclass(frozen=True)
class Injected:
    """Method "injected", with `draws` passes per operator, precision and step."""

    draws: int = 2

    def look(self, step: GradientStep) -> dict[Key, float]:
        return self.of(step, step.keys)

    def of(self, step: GradientStep, keys: Sequence[Key]) -> dict[Key, float]:
        exact = step.gradients()
        result: dict[Key, float] = {}
        for name, precision in keys:
            change = step.changes[name][precision]
            following = {item.operator for item in change.following}
            run = tapped(injecting(name, change, step.generator), also=following)
            result[name, precision] = step.square_error(run, exact, change.draws(self.draws))
        return result


def injecting(name: str, change: RoundingSite, generator: torch.Generator) -> Tap:
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
        of_result = back.pop(OUTPUT, [])
        for place, roundings in back.items():
            value = argument_at(changed, place)
            if value is not None and value.requires_grad:
                branch = value.view_as(value)
                _hook(branch, roundings, generator)
                put(changed, place, branch)
        result = call(changed)
        for item in change.rounded:
            if item.place == OUTPUT and not item.gradient:
                result = result + _drawn(item, result, generator)
        if isinstance(result, Tensor) and result.requires_grad:
            _hook(result, of_result, generator)
        return result

    return tap


def _hook(value: Tensor, roundings: list[Rounded], generator: torch.Generator) -> None:
    def with_error(gradient: Tensor, item: Rounded) -> Tensor:
        return gradient + _drawn(item, gradient, generator)

    for item in roundings:
        hook = functools.partial(with_error, item=item)
        value.register_hook(hook)  # type: ignore[no-untyped-call]


def _inside(fmt: Precision, places: Iterable[int], argument: list[Any], call: Call) -> Any:
    """Run an operator in a narrow format; `places` are the indices of the converted arguments."""
    wide = next(item.dtype for item in tree_leaves(argument) if is_floating(item))
    narrow = list(argument)

    def narrowed(tensor: Tensor) -> Tensor:
        return tensor.to(fmt.dtype) if tensor.is_floating_point() else tensor

    for index in places:
        narrow[index] = tree_map_only(Tensor, narrowed, narrow[index])
    result = call(narrow)
    return result.to(wide) if isinstance(result, Tensor) else result


def _drawn(item: Rounded, of: Tensor, generator: torch.Generator) -> Tensor:
    if not item.random:
        return error(of, item.fmt, item.rounding, item.keep).to(of.dtype)
    deviation = noise(of, item.fmt, item.rounding, item.keep).sqrt()
    normal = torch.randn(of.shape, generator=generator, dtype=torch.float64)
    return (normal.to(of.device) * deviation).to(of.dtype)


METHODS: Final = (MethodSpec("injected", Injected, lambda ops, formats: 1 + 2 * ops * formats),)
