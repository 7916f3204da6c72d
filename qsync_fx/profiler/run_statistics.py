"""Measurements of a model under one plan, and their statistics.

Stored runs are normalized: to the speed of the machine when the profile was measured (`at_pace`),
and to the same interference from other processes for all plans (`levelled`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class MeasuredOperator:
    """An operator in one run.

    Attributes:
        operator: its id.
        precision, output: names of the compute and output formats; None without a floating-point
            result.
        forward, backward: seconds.
    """

    operator: str
    precision: str | None
    output: str | None
    forward: float
    backward: float


@dataclass(frozen=True)
class Quantized:
    """One call of a quantizer.

    Attributes:
        operator: id of the operator whose operand it quantizes.
        before, after: names of the source and target formats.
        numel: number of elements.
        backward: whether it runs in the backward pass.
        seconds: duration.
    """

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
        operators: in program order; medians over the steps.
        quantized: in execution order; medians over the steps.
        planned: whether this is a plan of the user, not one that every profile measures.
    """

    label: str
    steps: list[tuple[float, float, float]]
    peak_bytes: int
    operators: list[MeasuredOperator]
    quantized: list[Quantized] = field(default_factory=list)
    planned: bool = False

    @property
    def forward(self) -> float:
        """Median seconds of the forward pass over all steps."""
        return statistics.median(step[0] for step in self.steps)

    @property
    def backward(self) -> float:
        """Median seconds of the backward pass over all steps."""
        return statistics.median(step[1] for step in self.steps)

    @property
    def passes(self) -> float:
        """Median seconds of forward and backward pass together over all steps."""
        return statistics.median(step[0] + step[1] for step in self.steps)

    def at_pace(self, pace: float) -> MeasuredRun:
        """Return the run with all times multiplied by `pace`."""
        if pace == 1:
            return self
        return replace(
            self,
            steps=[
                (forward * pace, backward * pace, rest * pace)
                for forward, backward, rest in self.steps
            ],
            operators=[
                replace(item, forward=item.forward * pace, backward=item.backward * pace)
                for item in self.operators
            ],
            quantized=[replace(item, seconds=item.seconds * pace) for item in self.quantized],
        )

    @property
    def undisturbed(self) -> float:
        """Seconds of both passes on an idle machine: the mean of the faster half of the steps."""
        return faster_half([step[0] + step[1] for step in self.steps])

    @property
    def spread(self) -> float:
        """Median absolute deviation of the steps from `passes`, relative to `passes`."""
        typical = self.passes
        return statistics.median(abs(step[0] + step[1] - typical) for step in self.steps) / typical

    @property
    def outside(self) -> tuple[float, float]:
        """Seconds of the forward and backward pass that belong to no operator."""
        inside = [sum(m.forward for m in self.operators), sum(m.backward for m in self.operators)]
        for call in self.quantized:
            inside[call.backward] += call.seconds
        return max(0.0, self.forward - inside[0]), max(0.0, self.backward - inside[1])


def faster_half(seconds: Sequence[float]) -> float:
    """Return the mean of the faster half, which suppresses slowdowns by other processes."""
    return statistics.mean(sorted(seconds)[: (len(seconds) + 1) // 2])


def paces(plans: Sequence[Sequence[float]]) -> list[float]:
    """Return factors that equalize the interference between plans that were run interleaved.

    Other processes only lengthen steps, and by chance lengthen one plan more than another. The
    ratio between plans is therefore the ratio of their faster halves. The common ratio of typical
    to fast steps is the median over all plans.

    Args:
        plans: seconds of the steps of each plan.

    Returns:
        one factor per plan, to be multiplied with its seconds.
    """
    shares = [faster_half(seconds) / statistics.median(seconds) for seconds in plans]
    level = statistics.median(shares)
    return [share / level for share in shares]


def levelled(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return the runs of interleaved plans with equalized interference: see `paces`."""
    used = paces([[forward + backward for forward, backward, _ in run.steps] for run in runs])
    return [run.at_pace(pace) for run, pace in zip(runs, used, strict=True)]


def sizes(value: Any) -> str | None:
    """Return an error text for a negative or non-finite number of a dataclass, else None."""
    for part in fields(value):
        result = getattr(value, part.name)
        for number in result if isinstance(result, tuple) else (result,):
            if isinstance(number, (int, float)) and not (math.isfinite(number) and number >= 0):
                return f" has {part.name} {number}, which no measurement gives"
    return None


def whole(run: MeasuredRun) -> str | None:
    if not run.steps:
        return f" holds no step of the run {run.label!r}"
    for step in run.steps:
        if (
            not all(math.isfinite(seconds) and seconds >= 0 for seconds in step)
            or step[0] + step[1] <= 0
        ):
            return f" has the step {step} in the run {run.label!r}, which no measurement gives"
    return sizes(run)
