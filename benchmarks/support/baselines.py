"""Baseline allocators of QSync's tables: full precision, and recovery in other orders.

If no plan meets the limits, they return a plan that exceeds them, and a note on the limits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from qsync_fx.allocator import PlanResult, Problem
from qsync_fx.allocator.baselines import Uniform, exceeded, full
from qsync_fx.allocator.evaluator import evaluate_plan
from qsync_fx.allocator.recovery import Indicator, PrecisionRecovery
from qsync_fx.errors import PlanError
from qsync_fx.formats import FORMATS, FP32
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity


@dataclass(frozen=True)
class FullPrecision:
    """Widest format of each class."""

    @property
    def name(self) -> str:
        return "full-precision"

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the plan, which may exceed limits."""
        plans = full(problem)
        evaluation = evaluate_plan(problem, plans)
        notes = exceeded(problem, evaluation)
        return PlanResult(problem, plans, evaluation, self.name, notes=notes)


@dataclass(frozen=True)
class RandomGreedy:
    """Precision recovery in random order (QSync, Table II)."""

    seed: int = 0

    @property
    def name(self) -> str:
        return "random"

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the plan; it exceeds limits only if recovery finds no plan within them."""

        def drawn(name: str, operator: str) -> float:
            return random.Random(f"{self.seed} {operator}").random()

        return _ordered(problem, _halved(problem, drawn), self.name)


@dataclass(frozen=True)
class HessianGreedy:
    """Precision recovery ordered by the Hessian indicator of HAWQ (QSync, Table II).

    Attributes:
        sensitivity: result of the method "hessian" of `benchmarks.support.indicators`.
    """

    sensitivity: Sensitivity = field(repr=False)

    @property
    def name(self) -> str:
        return "hessian"

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the plan; it exceeds limits only if recovery finds no plan within them."""

        def available(name: str, operator: str) -> float:
            part = problem.classes[name]
            return self.sensitivity.of(operator, part.runs(operator, part.choices[operator][0]))

        return _ordered(problem, _halved(problem, available), self.name)


def _halved(problem: Problem, narrowest: Callable[[str, str], float]) -> Indicator:
    """Return an indicator: a number for the narrowest format, halved for each next one; FP32: 0."""

    def indicator(name: str, operator: str, fmt: str) -> float:
        part = problem.classes[name]
        if FORMATS[part.runs(operator, fmt)].bits >= FP32.bits:
            return 0.0
        return float(narrowest(name, operator) * 0.5 ** part.choices[operator].index(fmt))

    return indicator


def _ordered(problem: Problem, indicator: Indicator, name: str) -> PlanResult:
    """Return the plan of precision recovery in another order; without one, a uniform plan."""
    try:
        return PrecisionRecovery(indicator, name).allocate(problem)
    except PlanError:
        return replace(Uniform().allocate(problem), allocator=name)
