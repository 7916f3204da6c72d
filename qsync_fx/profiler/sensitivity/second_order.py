"""Methods "second_order" and "hessian", from second derivatives.

"second_order": an error e of a tensor changes the gradients of all parameters by H e, through the
forward pass and the operator's own backward pass. `probed` estimates |H e|**2. Random errors are
uncorrelated, so theirs is sum_i E[e_i**2] |H_i|**2; errors of rounding to nearest are known and may
add up. A step costs the same number of passes for any number of operators and precisions. The
estimate is unbiased for errors that are small against the values. Flips of gates (`nonsmooth_ops`)
are added separately. Operators that run without autograd are left to the method "injected".

"hessian" is HAWQ's indicator, a baseline of QSync; see `HessianIndicator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qsync_fx.ops.spec import Place
from qsync_fx.profiler.sensitivity.checkpoint import Values, by_key, by_operator
from qsync_fx.profiler.sensitivity.gate_flips import flipping
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, MethodSpec
from qsync_fx.profiler.sensitivity.noise_injection import Injected
from qsync_fx.profiler.tensor_capture.gradient_probes import (
    Erring,
    Probed,
    erring,
    erring_behind,
    probed,
    signs,
)
from qsync_fx.profiler.tensor_capture.nonsmooth_ops import Flips, NonsmoothOperator
from qsync_fx.profiler.tensor_capture.rounding_sites import RoundingSite
from qsync_fx.profiler.tensor_capture.tensor_hooks import OperatorCall, Taps, tapped
from qsync_fx.profiler.training_state import trained


@dataclass(frozen=True)
class HessianIndicator:
    """HAWQ's indicator: largest eigenvalue of a weight's Hessian / weight size * squared error.

    Operators without a weight contribute 0, as the method ignores activations.

    Args:
        iterations: power iterations per step; the vector persists between steps.
    """

    iterations: int = 4
    _vectors: dict[str, Tensor] = field(default_factory=dict)

    def look(self, step: GradientStep) -> dict[Key, float]:
        weights: dict[str, Place] = {}
        for operator in step.captured.operators:
            if operator.row is not None and operator.row.scaled:
                weights[str(operator.id)] = operator.row.scaled[1]
        taps = Taps({name: {place} for name, place in weights.items()})
        step.again(0)
        with step.captured.running(tapped(taps.tap)):
            loss = step.loss()
        edges = [visited.tensors[weights[visited.operator]].edge for visited in taps.seen]
        slopes: tuple[Tensor | None, ...] = torch.autograd.grad(
            loss, edges, create_graph=True, allow_unused=True
        )
        sums: dict[Key, float] = {}
        for visited, edge, slope in zip(taps.seen, edges, slopes, strict=True):
            largest = (
                0.0
                if slope is None or not slope.requires_grad
                else self._largest(visited.operator, edge, slope, step)
            )
            size = visited.tensors[weights[visited.operator]].value.numel()
            for name, change in step.changes[visited.operator].items():
                errors = erring(visited, change, {})
                square = sum(
                    float(e.square.sum()) for e in errors if e.place == weights[visited.operator]
                )
                key = visited.operator, name
                sums[key] = sums.get(key, 0.0) + largest / size * square
        return sums

    def _largest(self, name: str, edge: GradientEdge, slope: Tensor, step: GradientStep) -> float:
        """Return the largest absolute eigenvalue of the derivative of `slope` at `edge`."""
        vector = self._vectors.get(name)
        if vector is None or vector.shape != slope.shape:
            vector = torch.randn(slope.shape, generator=step.generator).to(slope)
        value = 0.0
        for _ in range(self.iterations):
            vector = vector / vector.norm().clamp(min=torch.finfo(vector.dtype).tiny)
            result: tuple[Tensor | None, ...] = torch.autograd.grad(
                slope, [edge], vector, retain_graph=True, allow_unused=True
            )
            transposed = result[0]
            if transposed is None:
                return 0.0
            value, vector = float(transposed.norm()), transposed
        self._vectors[name] = vector
        return value


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
        """Add the results of one run for a gate."""
        self.runs[gate.name] = self.runs.get(gate.name, 0) + 1
        saved = self.sums.setdefault(gate.name, {})
        for key, square in squares.items():
            saved[key] = saved.get(key, 0.0) + square / max(1, gate.numel)

    def deviations(self, gate: str) -> dict[Key, float]:
        """Return the standard deviation at a gate's input."""
        runs = self.runs.get(gate, 0)
        return {key: math.sqrt(total / runs) for key, total in self.sums.get(gate, {}).items()}


@dataclass
class SecondOrder:
    """Method "second_order".

    The errors of an operator directly in front of a gate are known per element (`gate_flips`). The
    noise of other operators is measured for all gates once, then for a few gates per step, by one
    backward pass from each.

    Args:
        draws: sign vectors per step.
        gates: gates whose input noise is measured in each step.

    Attributes:
        reach: input noise of the gates, from all steps so far.
    """

    draws: int = 8
    gates: int = 4
    reach: Reach = field(default_factory=Reach)

    @property
    def learned(self) -> dict[str, Values]:
        """State of the steps so far, for the checkpoint."""
        runs = {"runs": {gate: {"": float(count)} for gate, count in self.reach.runs.items()}}
        return {gate: by_operator(sums) for gate, sums in self.reach.sums.items()} | runs

    def learn(self, learned: Mapping[str, Values]) -> None:
        """Restore the state of the steps before an interruption."""
        self.reach.runs = {gate: int(by[""]) for gate, by in learned.get("runs", {}).items()}
        self.reach.sums = {
            gate: by_key(learned[gate]) for gate in self.reach.runs if gate in learned
        }

    def look(self, step: GradientStep) -> dict[Key, float]:
        following = step.following
        taps = Taps(step.places, following)
        step.again(0)
        with step.captured.running(tapped(taps.tap, taps.watch, following)):
            loss = step.loss()
        numbers = {place: number for number, place in enumerate(taps.edges)}
        edges = list(taps.edges.values())
        ends = [edge for gate in taps.gates for edge in (gate.entry, gate.exit)]
        matches = probed(
            loss,
            list(trained(step.captured.model).values()),
            [*edges, *ends],
            self.draws,
            step.generator,
        )
        requested = self.reach.rarest(taps.gates, self.gates)
        before = {gate: len(edges) + 2 * index for index, gate in enumerate(taps.gates)}
        sums = _Sums(
            matches,
            [
                _GateQuery(gate, self._gains(gate, matches.gradients[before[gate]], edges, step))
                for gate in requested
            ],
        )
        for index, visited in enumerate(taps.seen):
            mine = {place: numbers[index, place] for place in visited.tensors}
            gradients = matches.of(mine)
            errors = [
                (keys, erring(visited, change, gradients, change.handed))
                for change, keys in _alike(step, visited).items()
            ]
            behind = following.get(visited.operator, {}).items()
            errors += [
                (keys, erring_behind(visited, follower, gradients)) for follower, keys in behind
            ]
            sums.add(index, mine, errors)
        for item in sums.asked:
            self.reach.add(item.gate, item.squares)
        result = sums.smooth()
        for gate, number in before.items():
            weights = _weights(gate, matches, number)
            if weights is not None:
                for key, square in self._flipped(step, taps, matches, gate, weights).items():
                    result[key] = result.get(key, 0.0) + square
        if taps.unrecorded:
            # Operators under torch.no_grad have errors, but no derivative reaches them.
            result |= Injected().of(step, [key for key in step.keys if key[0] in taps.unrecorded])
        return result

    def _flipped(
        self,
        step: GradientStep,
        taps: Taps,
        value: Probed,
        gate: NonsmoothOperator,
        weights: Tensor,
    ) -> dict[Key, float]:
        """Return the contributions of operators through flips of one gate."""
        flips = Flips(gate.histogram(weights))
        result = {
            key: flips.at(deviation) for key, deviation in self.reach.deviations(gate.name).items()
        }
        if gate.reads is None:
            return result
        visited = taps.seen[gate.reads]
        gradients = value.of(
            {place: index for index, (call, place) in enumerate(taps.edges) if call == gate.reads}
        )
        for change, keys in _alike(step, visited).items():
            chance = flipping(visited, erring(visited, change, gradients, change.handed))
            jumps = [(height, chance(place).view_as(weights)) for _, height, place in gate.places]
            square = sum(height**2 * float((weights * moved).sum()) for height, moved in jumps)
            for key in keys:
                result[key] = result.get(key, 0.0) + square
        return result

    def _gains(
        self,
        gate: NonsmoothOperator,
        like: Tensor | None,
        edges: Sequence[object],
        step: GradientStep,
    ) -> Sequence[Tensor | None]:
        """Return the derivatives of a random sum of a gate's input by each tensor."""
        if like is None or not edges:
            return [None] * len(edges)
        probe = [signs(like, step.generator)]
        return torch.autograd.grad([gate.entry], edges, probe, allow_unused=True, retain_graph=True)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _GateQuery:
    """A probed gate, the gains of tensors at its input, and the squared errors that reach it."""

    gate: NonsmoothOperator
    gains: Sequence[Tensor | None]
    squares: dict[Key, float] = field(default_factory=dict)


_Errs = tuple[Sequence[Key], Erring]
"""Error of a tensor, with the operators and precisions that cause it."""


@dataclass(frozen=True)
class _Sums:
    """Contributions in one run, without gates: random errors, and known errors per probe."""

    found: Probed
    asked: Sequence[_GateQuery]
    random: dict[Key, float] = field(default_factory=dict)
    fixed: dict[Key, list[float]] = field(default_factory=dict)

    def add(
        self,
        call: int,
        numbers: Mapping[Place, int],
        result: Sequence[tuple[Sequence[Key], Sequence[Erring]]],
    ) -> None:
        """Add the errors of one call, grouped by operators and precisions with equal errors."""
        by_tensor: dict[tuple[int, bool], list[_Errs]] = {}
        for keys, errors in result:
            # Keys without known errors contribute 0.
            for key in keys:
                self.random.setdefault(key, 0.0)
                self.fixed.setdefault(key, [0.0] * len(self.found.probes))
                for requested in self.asked:
                    requested.squares.setdefault(key, 0.0)
            for item in errors:
                by_tensor.setdefault((numbers[item.place], item.gradient), []).append((keys, item))
        for (number, gradient), errs in by_tensor.items():
            self._weigh(number, gradient, errs)
            if not gradient:
                self._reach(call, number, errs)

    def _weigh(self, number: int, gradient: bool, errs: Sequence[_Errs]) -> None:
        """Add the effect of one tensor's errors on the gradients of all parameters.

        The derivative is converted to FP64 once for all errors, which dominates the cost.
        """
        result = [
            probe.by_gradient.get(number) if gradient else probe.by_value[number]
            for probe in self.found.probes
        ]
        squares: Tensor | None = None
        for index, weight in enumerate(result):
            if weight is None:
                continue
            wide = weight.double().flatten()
            for keys, item in errs:
                if not item.random:
                    moved = float(item.values.flatten().dot(wide))
                    for key in keys:
                        self.fixed[key][index] += moved
            if any(item.random for _, item in errs):
                squares = wide.square_() if squares is None else squares.addcmul_(wide, wide)
        for keys, item in errs:
            if item.random and squares is not None:
                square = float(item.values.flatten().dot(squares)) / len(result)
                for key in keys:
                    self.random[key] += square

    def _reach(self, call: int, number: int, errs: Sequence[_Errs]) -> None:
        """Add the effect of one tensor's errors at the inputs of the probed gates."""
        for requested in self.asked:
            gain = None if requested.gate.reads == call else requested.gains[number]
            if gain is None:
                continue
            squares = gain.double().flatten().square_()
            for keys, item in errs:
                square = float(item.square.flatten().dot(squares))
                for key in keys:
                    requested.squares[key] += square

    def smooth(self) -> dict[Key, float]:
        """Return the contribution of each operator in each precision."""
        draws = len(self.found.probes)
        return {
            key: value + sum(item**2 for item in self.fixed[key]) / draws
            for key, value in self.random.items()
        }


def _alike(step: GradientStep, observed: OperatorCall) -> dict[RoundingSite, list[Key]]:
    """Return the precisions of a call grouped by rounding site, as several may be equal."""
    result: dict[RoundingSite, list[Key]] = {}
    for name, change in step.changes.get(observed.operator, {}).items():
        result.setdefault(change, []).append((observed.operator, name))
    return result


def _weights(gate: NonsmoothOperator, result: Probed, number: int) -> Tensor | None:
    """Return the effect of flips of a gate's elements; None if the gradients do not depend on them.

    Args:
        number: index of the gate's entry; its exit follows.
    """
    incoming, slopes = (
        result.gradients[number + 1],
        [probe.by_gradient.get(number) for probe in result.probes],
    )
    weights = [
        gate.weights(slope, incoming)
        for slope in slopes
        if slope is not None and incoming is not None
    ]
    return sum(weights[1:], weights[0]) / len(slopes) if weights else None


METHODS: Final = (
    MethodSpec(
        "second_order",
        SecondOrder,
        "exact variances, carried to the gradients by second derivatives, and the gates that flip",
        lambda operators, precisions: 20,
        twice=True,
    ),
    MethodSpec(
        "hessian",
        HessianIndicator,
        "HAWQ: the top eigenvalue of each weight's Hessian",
        lambda operators, precisions: 2 + 8 * operators,
        twice=True,
    ),
)
