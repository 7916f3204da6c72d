"""Measurements of a model under one plan, and their statistics."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy

from qsync_fx.predictor.model.model_graph import StateNames


@dataclass(frozen=True)
class MeasuredOperator:
    """Seconds of an operator in one run, and its compute and output format if it has any."""

    operator: str
    precision: str | None
    output: str | None
    forward: float
    backward: float

    @property
    def state(self) -> StateNames:
        return self.precision, self.output

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Quantized:
    """One call of a quantizer from format `before` to `after`, for an operand of `operator`."""

    operator: str
    before: str
    after: str
    numel: int
    backward: bool
    seconds: float


@dataclass(frozen=True)
class MeasuredRun:
    """The model under one plan.

    Attributes:
        label: the plan in words; the name of a format for a uniform plan.
        steps: seconds of the forward pass, the backward pass and the optimizer, for each step.
        peak_bytes: peak memory of a step beyond the memory allocated before it.
        operators, quantized: in program and execution order; medians over the steps.
        planned: whether this is a plan of the user, not one that every profile measures.
    """

    label: str
    steps: list[tuple[float, float, float]]
    peak_bytes: int
    operators: list[MeasuredOperator]
    quantized: list[Quantized] = field(default_factory=list)
    planned: bool = False

    @property
    def states(self) -> list[tuple[str, StateNames]]:
        return [(item.operator, item.state) for item in self.operators]

    @property
    def forward(self) -> float:
        return statistics.median(step[0] for step in self.steps)

    @property
    def backward(self) -> float:
        return statistics.median(step[1] for step in self.steps)

    @property
    def passes(self) -> float:
        return statistics.median(step[0] + step[1] for step in self.steps)

    def at_pace(self, pace: float) -> MeasuredRun:
        operators = [
            replace(item, forward=item.forward * pace, backward=item.backward * pace)
            for item in self.operators
        ]
        quantized = [replace(item, seconds=item.seconds * pace) for item in self.quantized]
        steps = [(first * pace, second * pace, rest * pace) for first, second, rest in self.steps]
        return replace(self, steps=steps, operators=operators, quantized=quantized)

    @property
    def spread(self) -> float:
        """Median absolute deviation of the steps from `passes`, relative to `passes`."""
        typical = self.passes
        return statistics.median(abs(step[0] + step[1] - typical) for step in self.steps) / typical

    @property
    def outside(self) -> tuple[float, float]:
        """Seconds of each pass that belong to no operator."""
        forward = sum(item.forward for item in self.operators)
        inside = [forward, sum(item.backward for item in self.operators)]
        for call in self.quantized:
            inside[call.backward] += call.seconds
        return max(0.0, self.forward - inside[0]), max(0.0, self.backward - inside[1])


def faster_half(seconds: Sequence[float]) -> float:
    """Return the mean of the faster half, which suppresses slowdowns by other processes."""
    return statistics.mean(sorted(seconds)[: (len(seconds) + 1) // 2])


def merged(runs: Sequence[MeasuredRun]) -> MeasuredRun:
    """Return the runs of a plan as one, with medians of operators and quantizers."""
    operators = [
        replace(
            same[0],
            forward=statistics.median(item.forward for item in same),
            backward=statistics.median(item.backward for item in same),
        )
        for same in zip(*(run.operators for run in runs), strict=True)
    ]
    quantized = [
        replace(same[0], seconds=statistics.median(item.seconds for item in same))
        for same in zip(*(run.quantized for run in runs), strict=True)
    ]
    steps = [step for run in runs for step in run.steps]
    return replace(runs[-1], steps=steps, operators=operators, quantized=quantized)


def paces(plans: Sequence[Sequence[float]]) -> list[float]:
    """Return a factor per plan that equalizes the interference with interleaved plans.

    Other processes only lengthen steps, and by chance lengthen one plan more than another. The
    ratio between plans is therefore the ratio of their faster halves. The common ratio of typical
    to fast steps is the median over all plans.
    """
    shares = [faster_half(seconds) / statistics.median(seconds) for seconds in plans]
    level = statistics.median(shares)
    return [share / level for share in shares]


def levelled(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    used = paces([[forward + backward for forward, backward, _ in run.steps] for run in runs])
    return [run.at_pace(pace) for run, pace in zip(runs, used, strict=True)]


@dataclass(frozen=True)
class Quantizing:
    """Linear cost of a quantizer: `fixed + each * numel` seconds, measured up to `largest`."""

    fixed: float
    each: float
    largest: int

    def seconds(self, numel: int) -> float:
        return self.fixed + self.each * numel


def fitted(runs: Iterable[MeasuredRun]) -> Mapping[tuple[str, str], Quantizing]:
    times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for run in runs:
        for call in run.quantized:
            times[call.before, call.after].append((call.numel, call.seconds))
    return {pair: _line(item) for pair, item in times.items()}


def _line(times: Sequence[tuple[int, float]]) -> Quantizing:
    """Fit a non-negative line by least squares with weights 1 / seconds."""
    numel, seconds = numpy.array(times, dtype=float).T
    weights = 1 / numpy.sqrt(numpy.maximum(seconds, 1e-9))
    rows = numpy.stack([numpy.ones_like(numel), numel], axis=1) * weights[:, None]
    fixed, each = numpy.linalg.lstsq(rows, seconds * weights, rcond=None)[0]
    if each < 0 or (numel == numel[0]).all():
        fixed, each = seconds.mean(), 0.0
    elif fixed < 0:
        fixed, each = 0.0, (seconds * weights**2 * numel).sum() / (weights**2 * numel**2).sum()
    return Quantizing(float(fixed), float(each), int(numel.max()))


def check_numbers(value: Any) -> str | None:
    """Return an error text for a negative or non-finite number of a dataclass, else None."""
    for part in fields(value):
        number = getattr(value, part.name)
        if isinstance(number, (int, float)) and not (math.isfinite(number) and number >= 0):
            return f" has {part.name} {number}, which no measurement gives"
    return None


def check_run(run: MeasuredRun) -> str | None:
    if not run.steps:
        return f" holds no step of the run {run.label!r}"
    for step in run.steps:
        valid = all(math.isfinite(seconds) and seconds >= 0 for seconds in step)
        if not valid or step[0] + step[1] <= 0:
            return f" has the step {step} in the run {run.label!r}, which no measurement gives"
    return check_numbers(run)
