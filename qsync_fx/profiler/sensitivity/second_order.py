"""The method "second_order": what errors at each operator do to the gradients of all parameters, for all operators and precisions in one
run.

A tensor of an operator that is rounded errs by e, which changes the gradients by H e: by what follows in the forward pass, and by the
operator's own part in the backward pass; `probed` gives |H e|**2. Errors that are random have no products in the mean: of them
sum_i E[e_i**2] |H_i|**2 is taken. Those of roundings to nearest are known, belong together, and may add up.

Gates flip beside that (see `gates`). Of an operator right in front of one it is known which elements its errors move past the jump (see
`direct`). How much noise of others gets there is asked of all gates once and then of a few a step, those that were asked least, each by one
backward pass from there.

Operators that run where the model records no gradients are left to "injected".

Invariant: unbiased where errors are small against what the model computes with. A step costs as many passes whatever the number of
operators and precisions.

The method "hessian": HAWQ's indicator, which QSync compares itself with.

The largest eigenvalue of the Hessian of an operator's weight, by power iteration, divided by the size of the weight and multiplied with
the square error that the format makes of it.

Invariant: operators without a weight add nothing, whatever their format: the method says nothing of activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from qsync_fx.ops.spec import Place
from qsync_fx.profiler.sensitivity.checkpoint import Values, by_key, by_operator
from qsync_fx.profiler.sensitivity.gate_flips import flipping
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key
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
    """
    Args:
        iterations: of the power method a step; the vector is kept from step to step.
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
        """Returns the magnitude of the largest eigenvalue of the derivative of `slope` by what is at `edge`."""
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
    """The variance of what gates read that operators cause: sums over runs, by gate, and by operator and precision."""

    sums: dict[str, dict[Key, float]] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)

    def rarest(self, gates: Sequence[NonsmoothOperator], most: int) -> list[NonsmoothOperator]:
        """Returns the gates to ask: those that never were, else the ones that were asked least."""
        never = [gate for gate in gates if gate.name not in self.runs]
        return never or sorted(gates, key=lambda gate: self.runs[gate.name])[:most]

    def add(self, gate: NonsmoothOperator, squares: Mapping[Key, float]) -> None:
        """Takes in what one run says of a gate."""
        self.runs[gate.name] = self.runs.get(gate.name, 0) + 1
        saved = self.sums.setdefault(gate.name, {})
        for key, square in squares.items():
            saved[key] = saved.get(key, 0.0) + square / max(1, gate.numel)

    def deviations(self, gate: str) -> dict[Key, float]:
        """Returns the standard deviation in front of a gate."""
        runs = self.runs.get(gate, 0)
        return {key: math.sqrt(total / runs) for key, total in self.sums.get(gate, {}).items()}


@dataclass
class SecondOrder:
    """
    Args:
        draws: of signs a step.
        gates: how many gates are asked for the noise in front of them in each step.

    Attributes:
        reach: what all steps so far have said of that.
    """

    draws: int = 8
    gates: int = 4
    reach: Reach = field(default_factory=Reach)

    @property
    def learned(self) -> dict[str, Values]:
        """What the steps so far have said, as files hold it."""
        runs = {"runs": {gate: {"": float(count)} for gate, count in self.reach.runs.items()}}
        return {gate: by_operator(sums) for gate, sums in self.reach.sums.items()} | runs

    def learn(self, learned: Mapping[str, Values]) -> None:
        """Takes up what the steps before an interruption have said."""
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
            # What a model computes under torch.no_grad errs all the same, and no derivative leads there.
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
        """Returns what operators add by the flips of one gate."""
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
        """Returns what each tensor does to a random sum of what a gate reads."""
        if like is None or not edges:
            return [None] * len(edges)
        probe = [signs(like, step.generator)]
        return torch.autograd.grad([gate.entry], edges, probe, allow_unused=True, retain_graph=True)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _GateQuery:
    """A gate that is asked, what tensors do to it, and the squares that get there."""

    gate: NonsmoothOperator
    gains: Sequence[Tensor | None]
    squares: dict[Key, float] = field(default_factory=dict)


_Errs = tuple[Sequence[Key], Erring]
"""What one tensor errs by, and for which operators and precisions."""


@dataclass(frozen=True)
class _Sums:
    """What operators add in one run, without gates: what is random, and for each probe the sum of what is not."""

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
        """Takes in what errs in one call of an operator: for operators and precisions that come to the same, its tensors' errors."""
        by_tensor: dict[tuple[int, bool], list[_Errs]] = {}
        for keys, errors in result:
            # What nothing is known of yet adds nothing.
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
        """Adds what errors of one tensor do to the gradients of all parameters. It is in FP64 once for all errors: that takes longest."""
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
        """Adds what errors of one tensor do in front of the gates that are asked."""
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
        """Returns what each operator adds in each precision."""
        draws = len(self.found.probes)
        return {
            key: value + sum(item**2 for item in self.fixed[key]) / draws
            for key, value in self.random.items()
        }


def _alike(step: GradientStep, observed: OperatorCall) -> dict[RoundingSite, list[Key]]:
    """Returns the precisions of a call by what changes in it: several may come to the same."""
    result: dict[RoundingSite, list[Key]] = {}
    for name, change in step.changes.get(observed.operator, {}).items():
        result.setdefault(change, []).append((observed.operator, name))
    return result


def _weights(gate: NonsmoothOperator, result: Probed, number: int) -> Tensor | None:
    """Returns what flips of a gate's elements do; `number` is of its entry, and its exit follows. None where nothing depends on it."""
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
