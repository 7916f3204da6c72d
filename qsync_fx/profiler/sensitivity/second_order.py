"""Method "second_order", from second derivatives.

An error e of a tensor changes the gradients of all parameters by H e, and `probed` estimates
|H e|**2. Random errors are uncorrelated, so theirs is sum_i E[e_i**2] |H_i|**2; errors of rounding
to nearest are known and may add up. Flips of gates (`nonsmooth_ops`) are added.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qsync_fx.graph.fx_utils import argument_at
from qsync_fx.ops.spec import Place
from qsync_fx.predictor.indicator.rounding_variance import Product, product_noise
from qsync_fx.profiler.sensitivity.checkpoint import Values, by_key, by_operator
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, MethodSpec, trained
from qsync_fx.profiler.sensitivity.noise_injection import Injected
from qsync_fx.profiler.tensor_capture.gradient_probes import (
    Erring,
    Probed,
    erring,
    erring_behind,
    probed,
    signs,
)
from qsync_fx.profiler.tensor_capture.nonsmooth_ops import NonsmoothOperator, flip_error
from qsync_fx.profiler.tensor_capture.rounding_sites import RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OUTPUT, OperatorCall, Taps, put, tapped

PROBE_BYTES: Final = 4 * 2**30
"""Most bytes of the derivatives of all draws of a step; steps are repeated until the mean settles.
"""


@dataclass
class Reach:
    """Variance at the inputs of gates, summed over runs, by gate, operator and precision."""

    sums: dict[str, dict[Key, float]] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)

    def rarest(self, gates: Sequence[NonsmoothOperator], most: int) -> list[NonsmoothOperator]:
        """Return the gates to probe: all new ones, else the `most` that were probed least."""
        never = [gate for gate in gates if gate.name not in self.runs]
        return never or sorted(gates, key=lambda gate: self.runs[gate.name])[:most]

    def add(self, gate: NonsmoothOperator, squares: Mapping[Key, float]) -> None:
        self.runs[gate.name] = self.runs.get(gate.name, 0) + 1
        saved = self.sums.setdefault(gate.name, {})
        for key, square in squares.items():
            saved[key] = saved.get(key, 0.0) + square / max(1, gate.numel)

    def deviations(self, gate: str) -> dict[Key, float]:
        runs = self.runs.get(gate, 0)
        return {key: math.sqrt(total / runs) for key, total in self.sums.get(gate, {}).items()}


@dataclass
class SecondOrder:
    """Method "second_order", with `draws` sign vectors per step, or fewer for a large model.

    The errors of an operator directly in front of a gate are known per element (`flipping`). The
    noise of other operators is measured for all gates once, then for `gates` of them per step, by
    one backward pass from each. Operators that run without autograd are left to "injected".
    """

    draws: int = 8
    gates: int = 4
    reach: Reach = field(default_factory=Reach)

    @property
    def learned(self) -> dict[str, Values]:
        runs = {"runs": {gate: {"": float(count)} for gate, count in self.reach.runs.items()}}
        return {gate: by_operator(sums) for gate, sums in self.reach.sums.items()} | runs

    def learn(self, learned: Mapping[str, Values]) -> None:
        self.reach.runs = {gate: int(by[""]) for gate, by in learned.get("runs", {}).items()}
        measured = self.reach.runs.keys() & learned.keys()
        self.reach.sums = {gate: by_key(learned[gate]) for gate in measured}

    def look(self, step: GradientStep) -> dict[Key, float]:
        following = step.following
        taps = Taps(step.places, following)
        step.again(0)
        with step.captured.running(tapped(taps.tap, taps.watch, following)):
            loss = step.loss()
        edges = list(taps.edges.values())
        ends = [edge for gate in taps.gates for edge in (gate.entry, gate.exit)]
        parameters = list(trained(step.captured.model).values())
        draws = max(1, min(self.draws, PROBE_BYTES // max(1, _probe_bytes(taps.calls))))
        result = probed(loss, parameters, [*edges, *ends], draws, step.generator)
        entries = {gate.name: len(edges) + 2 * index for index, gate in enumerate(taps.gates)}
        inputs = [
            _GateInput(gate, _gains(gate, result.gradients[entries[gate.name]], edges, step))
            for gate in self.reach.rarest(taps.gates, self.gates)
        ]
        sums = _Sums(result, inputs, step.keys)
        numbers: list[dict[Place, int]] = [{} for _ in taps.calls]
        for number, (call_index, place) in enumerate(taps.edges):
            numbers[call_index][place] = number
        for index, call in enumerate(taps.calls):
            gradients = result.of(numbers[index])
            errors = _errors(step, call, gradients)
            for follower, keys in following.get(call.operator, {}).items():
                errors.append((keys, erring_behind(call, follower, gradients)))
            sums.add(index, numbers[index], errors)
        for item in inputs:
            self.reach.add(item.gate, item.squares)
        squares = sums.total()
        for gate in taps.gates:
            weights = _weights(gate, result, entries[gate.name])
            if weights is None:
                continue
            flips = gate.histogram(weights)
            for key, deviation in self.reach.deviations(gate.name).items():
                squares[key] = squares.get(key, 0.0) + flip_error(flips, deviation)
            if gate.reads is not None:
                call = taps.calls[gate.reads]
                errors = _errors(step, call, result.of(numbers[gate.reads]))
                _add_flips_behind(squares, call, errors, gate, weights)
        if taps.unrecorded:
            # Operators under torch.no_grad have errors, but no derivative reaches them.
            keys = [key for key in step.keys if key[0] in taps.unrecorded]
            squares |= Injected().of(step, keys)
        return squares


def _probe_bytes(calls: Sequence[OperatorCall]) -> int:
    """Return the bytes of a draw: derivatives by each tensor of a call and by its gradient."""
    values = [tapped.value for call in calls for tapped in call.tensors.values()]
    return 2 * sum(value.nbytes for value in values)


KeyErrors = tuple[Sequence[Key], Sequence[Erring]]


def _errors(
    step: GradientStep, call: OperatorCall, gradients: Mapping[Place, Tensor]
) -> list[KeyErrors]:
    """Return the errors of a call by its own precisions; several may have equal sites."""
    sites: dict[RoundingSite, list[Key]] = {}
    for name, site in step.changes.get(call.operator, {}).items():
        sites.setdefault(site, []).append((call.operator, name))
    return [(keys, erring(call, site, gradients, site.handed)) for site, keys in sites.items()]


@dataclass(frozen=True)
class _GateInput:
    """A probed gate, the gains of tensors at its input, and the squared errors that reach it."""

    gate: NonsmoothOperator
    gains: Sequence[Tensor | None]
    squares: dict[Key, float] = field(default_factory=dict)


def _gains(
    gate: NonsmoothOperator, like: Tensor | None, edges: Sequence[GradientEdge], step: GradientStep
) -> Sequence[Tensor | None]:
    """Return the derivatives of a random sum of a gate's input by each tensor."""
    if like is None or not edges:
        return [None] * len(edges)
    probe = [signs(like, step.generator)]
    return torch.autograd.grad([gate.entry], edges, probe, allow_unused=True, retain_graph=True)


class _Sums:
    """Contributions in one run, without gates: random errors, and known errors per probe."""

    def __init__(self, result: Probed, inputs: Sequence[_GateInput], keys: Sequence[Key]) -> None:
        self._result, self._inputs = result, inputs
        # Keys without known errors contribute 0.
        self._random = dict.fromkeys(keys, 0.0)
        self._fixed = {key: [0.0] * len(result.probes) for key in keys}
        for item in inputs:
            item.squares.update(self._random)

    def add(self, call: int, numbers: Mapping[Place, int], errors: Sequence[KeyErrors]) -> None:
        by_tensor: dict[tuple[int, bool], list[tuple[Sequence[Key], Erring]]] = defaultdict(list)
        for keys, of_keys in errors:
            for item in of_keys:
                by_tensor[numbers[item.place], item.gradient].append((keys, item))
        for (number, gradient), of_tensor in by_tensor.items():
            self._add_to_gradients(number, gradient, of_tensor)
            if not gradient:
                self._add_to_gates(call, number, of_tensor)

    def _add_to_gradients(
        self, number: int, gradient: bool, errors: Sequence[tuple[Sequence[Key], Erring]]
    ) -> None:
        """Add the effect of one tensor's errors on the gradients; FP64 once for all errors."""
        probes = self._result.probes
        squares: Tensor | None = None
        for index, probe in enumerate(probes):
            weight = probe.by_gradient.get(number) if gradient else probe.by_value[number]
            if weight is None:
                continue
            wide = weight.double().flatten()
            for keys, item in errors:
                if not item.random:
                    moved = float(item.values.flatten().dot(wide))
                    for key in keys:
                        self._fixed[key][index] += moved
            if not any(item.random for _, item in errors):
                continue
            if squares is None:
                squares = torch.zeros_like(wide)
            squares.addcmul_(wide, wide)
        for keys, item in errors:
            if item.random and squares is not None:
                square = float(item.values.flatten().dot(squares)) / len(probes)
                for key in keys:
                    self._random[key] += square

    def _add_to_gates(
        self, call: int, number: int, errors: Sequence[tuple[Sequence[Key], Erring]]
    ) -> None:
        for requested in self._inputs:
            gain = requested.gains[number]
            if gain is None or requested.gate.reads == call:
                continue
            squares = gain.double().flatten().square_()
            for keys, item in errors:
                square = float(item.square.flatten().dot(squares))
                for key in keys:
                    requested.squares[key] += square

    def total(self) -> dict[Key, float]:
        draws = len(self._result.probes)
        return {
            key: value + sum(item**2 for item in self._fixed[key]) / draws
            for key, value in self._random.items()
        }


def _weights(gate: NonsmoothOperator, result: Probed, number: int) -> Tensor | None:
    """Return the effect of flips of a gate, by its entry; None if no gradient depends on them."""
    incoming = result.gradients[number + 1]
    slopes = [probe.by_gradient.get(number) for probe in result.probes]
    total: Tensor | None = None
    for slope in slopes:
        if slope is not None and incoming is not None:
            weights = gate.weights(slope, incoming) / len(slopes)
            total = weights if total is None else total.add_(weights)
    return total


def _add_flips_behind(
    squares: dict[Key, float],
    call: OperatorCall,
    errors: Sequence[KeyErrors],
    gate: NonsmoothOperator,
    weights: Tensor,
) -> None:
    for keys, of_keys in errors:
        chance = flipping(call, of_keys)
        square = 0.0
        for _, height, position in gate.places:
            flipped = weights * chance(position).view_as(weights)
            square += height**2 * float(flipped.sum())
        for key in keys:
            squares[key] = squares.get(key, 0.0) + square


def flipping(call: OperatorCall, errors: Sequence[Erring]) -> Callable[[float], Tensor]:
    """Return the flip probability by jump position, for a gate that reads a call's result.

    The noise in front of a gate correlates with its input: a sum of small values has small errors,
    and is near the jump. So the error of each element is used, not the distribution over all.
    """
    value = call.tensors[OUTPUT].value
    current = [item for item in errors if not item.gradient]
    random = {item.place: item.values for item in current if item.random}
    deterministic = [item for item in current if not item.random]
    # A single rounding to nearest preserves the order with respect to the jump.
    moved = _moved(call, value, [e for e in deterministic if not (e.place == OUTPUT and e.ordered)])
    deviation = _variance(call, random).sqrt() if random else None

    def chance(position: float) -> Tensor:
        if deviation is None:
            return torch.ne(value > position, moved > position).double()
        shift = moved.double() - position
        distance = torch.where(value > position, shift, -shift)
        # Without noise, 0 / 0 is NaN; the probability is 0.
        result: Tensor = torch.special.ndtr(-distance / deviation)
        return result.nan_to_num(nan=0.0)

    return chance


def _moved(call: OperatorCall, value: Tensor, errors: Sequence[Erring]) -> Tensor:
    of_inputs = [item for item in errors if item.place != OUTPUT]
    of_result = [item for item in errors if item.place == OUTPUT]
    moved = value
    # Errors of operators that compute in a narrow format are measured at the output, and complete.
    if of_inputs and not of_result:
        inputs: list[Any] = list(call.arguments)
        for item in of_inputs:
            exact = argument_at(inputs, item.place)
            put(inputs, item.place, exact + item.values.to(exact.dtype))
        with torch.no_grad():
            moved = call.call(inputs)
    for item in of_result:
        moved = moved + item.values.to(value.dtype)
    return moved


def _variance(call: OperatorCall, random: Mapping[Place, Tensor]) -> Tensor:
    product, *factors = factored(call)
    variances = [
        random.get(place, torch.zeros_like(factor, dtype=torch.float64))
        for place, factor in zip(call.row.scaled, factors, strict=True)
    ]
    with torch.no_grad():
        return product_noise(product, *factors, *variances)


def factored(call: OperatorCall) -> tuple[Product, Tensor, Tensor]:
    """Return an operator without bias as a product of two factors in FP64, and the factors."""
    row = call.row

    def product(a: Tensor, b: Tensor) -> Tensor:
        inputs: list[Any] = list(call.arguments)
        for index in row.added:
            if index < len(inputs) and isinstance(inputs[index], Tensor):
                inputs[index] = _wide(inputs[index]) * 0
        for place, value in zip(row.scaled, (a, b), strict=True):
            put(inputs, place, _wide(value))
        result: Tensor = call.call(inputs)
        return result

    first, second = (argument_at(call.arguments, place) for place in row.scaled)
    return product, first, second


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


METHODS: Final = (
    MethodSpec("second_order", SecondOrder, lambda operators, formats: 20, twice=True),
)
