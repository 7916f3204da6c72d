"""What was measured of a model under one plan.

Invariant: what is kept is what was measured, at the pace that the machine had when its profile began, and as if others had disturbed all
plans alike; medians, spreads and what belongs to no operator follow from it.
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
        precision, output: names of the formats that it computed in and gave out; None for what has no floating-point result.
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
        operator: the operator that it is for.
        before, after: names of the formats.
        numel: elements.
        backward: whether it runs in the backward pass.
        seconds: that it took.
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
        label: the plan in words; the name of a format where all operators were planned in one.
        steps: of each step the seconds of the forward pass, the backward pass and the optimizer.
        peak_bytes: what a step holds at most beyond what is there before it.
        operators: in program order; medians over the steps.
        quantized: in the order that they ran; medians over the steps.
        planned: whether it is a plan of the user's, and none of those that all profiles have.
    """

    label: str
    steps: list[tuple[float, float, float]]
    peak_bytes: int
    operators: list[MeasuredOperator]
    quantized: list[Quantized] = field(default_factory=list)
    planned: bool = False

    @property
    def forward(self) -> float:
        """Seconds of the forward pass, the median over all steps."""
        return statistics.median(step[0] for step in self.steps)

    @property
    def backward(self) -> float:
        """Seconds of the backward pass, the median over all steps."""
        return statistics.median(step[1] for step in self.steps)

    @property
    def passes(self) -> float:
        """Seconds of both, the median over all steps."""
        return statistics.median(step[0] + step[1] for step in self.steps)

    def at_pace(self, pace: float) -> MeasuredRun:
        """Returns the run as it would be on a machine on which everything takes so much of the time."""
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
        """Seconds of both, as if nothing else had been on the machine: the mean over the faster half of the steps."""
        return faster_half([step[0] + step[1] for step in self.steps])

    @property
    def spread(self) -> float:
        """How far steps lie from that, in the median, as a share of it: what differs less, differs by chance."""
        typical = self.passes
        return statistics.median(abs(step[0] + step[1] - typical) for step in self.steps) / typical

    @property
    def outside(self) -> tuple[float, float]:
        """Seconds of each pass that belong to no operator."""
        inside = [sum(m.forward for m in self.operators), sum(m.backward for m in self.operators)]
        for call in self.quantized:
            inside[call.backward] += call.seconds
        return max(0.0, self.forward - inside[0]), max(0.0, self.backward - inside[1])


def faster_half(seconds: Sequence[float]) -> float:
    """Returns the mean over the faster half: what others on the machine made longer is hardly in it."""
    return statistics.mean(sorted(seconds)[: (len(seconds) + 1) // 2])


def paces(plans: Sequence[Sequence[float]]) -> list[float]:
    """Returns by what the typical seconds of plans that took turns are to be multiplied, as if others had disturbed all plans alike.

    What else a machine does makes steps longer, never shorter, and by chance those of one plan more than those of another. So plans are to
    one another as their undisturbed steps are; how much longer the typical step is follows from all of them together.
    """
    shares = [faster_half(seconds) / statistics.median(seconds) for seconds in plans]
    level = statistics.median(shares)
    return [share / level for share in shares]


def levelled(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Returns runs of plans that took turns as if others had disturbed all of them alike: see `paces`."""
    used = paces([[forward + backward for forward, backward, _ in run.steps] for run in runs])
    return [run.at_pace(pace) for run, pace in zip(runs, used, strict=True)]


def sizes(value: Any) -> str | None:
    """Returns which number of a dataclass cannot be, None where all can."""
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
