"""Method "monte_carlo", the reference for the other indicators.

Each operator in turn runs in each precision, and the gradients are compared with FP32's. The graph
is the backend's under the plan that names only this operator, including casts, cascaded neighbours
and lowered operators.

Invariant: two runs differ only by rounding; weights, batch, dropout and statistics are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from qsync_fx.diagnostics.explanation import Explained, ReplayedPlan
from qsync_fx.plan import Plan
from qsync_fx.profiler.sensitivity.gradient_step import (
    Gradients,
    GradientStep,
    Key,
    MethodSpec,
)
from qsync_fx.profiler.tensor_capture.graph_capture import Run


@dataclass(frozen=True)
class Truth:
    """Effect of an operator in a precision on the gradients, summed over all elements.

    Attributes:
        variance: variance of the gradients over the draws of rounding.
        bias: squared difference of their mean from the FP32 gradients.
    """

    variance: float
    bias: float

    @property
    def square(self) -> float:
        """Mean square error, which includes deterministic rounding."""
        return self.variance + self.bias


@dataclass(frozen=True)
class MonteCarlo:
    """Method "monte_carlo".

    Args:
        draws: passes per operator, precision and step; one if rounding is deterministic.
    """

    draws: int = 4
    _lowered: dict[Key, Run] = field(default_factory=dict)

    def look(self, step: GradientStep) -> dict[Key, float]:
        return {key: item.square for key, item in self.truths(step).items()}

    def truths(self, step: GradientStep) -> dict[Key, Truth]:
        exact = step.gradients()
        result: dict[Key, Truth] = {}
        for key in step.keys:
            name, precision = key
            run = self._lowered.setdefault(key, lowered(Plan("fp32", operators={name: precision})))
            result[key] = truth(
                step, run, self.draws if step.changes[name][precision].random else 1, exact
            )
        return result


def lowered(plan: Plan) -> Run:
    """Return a runner of graphs as the backend lowers them under `plan`."""
    modules: dict[int, Any] = {}

    def run(part: Explained, inputs: Sequence[Any]) -> Any:
        if id(part) not in modules:
            with part.context.there():
                modules[id(part)] = ReplayedPlan(part.snapshots, part.costing, plan).graph.module
        return modules[id(part)](*inputs)

    return run


def truth(step: GradientStep, run: Run, draws: int, exact: Gradients) -> Truth:
    """Return the effect of running graphs with `run`, compared with the gradients `exact`."""
    mean = {name: torch.zeros_like(g, dtype=torch.float64) for name, g in exact.items()}
    total = 0.0
    for sample in range(draws):
        for name, g in step.gradients(run, sample).items():
            difference = g.double() - exact[name].double()
            total += float(difference.square().sum()) / draws
            mean[name] += difference / draws
    of_mean = sum(float(m.square().sum()) for m in mean.values())
    if draws == 1:
        return Truth(0.0, of_mean)
    # The mean of n draws has 1/n of their variance; this is Bessel's correction.
    variance = max(0.0, total - of_mean) * draws / (draws - 1)
    return Truth(variance, max(0.0, total - variance))


METHODS: Final = (
    MethodSpec(
        "monte_carlo",
        MonteCarlo,
        "each operator in turn runs in the precision: the truth that the others are held to",
        lambda operators, precisions: 1 + 4 * operators * precisions,
    ),
)
