"""The paper's allocator with other orders of operators: `Random` and `Hessian` (QSync, Table II).

As there, what an operator adds in its narrowest format is drawn, or HAWQ's number, and is halved with each wider one.

Invariant: only the order is another's. What the answer says of the variance is the judge's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from qsync_fx.allocator.answer import Answer
from qsync_fx.allocator.baselines.uniform import best, exceeded
from qsync_fx.allocator.paper import Greedy
from qsync_fx.allocator.paper.recovery import Indicator
from qsync_fx.allocator.problem import Problem
from qsync_fx.allocator.uniforms import uniforms
from qsync_fx.errors import PlanError
from qsync_fx.precision import FORMATS
from qsync_fx.predictor.sensitivity.value import Sensitivity


@dataclass(frozen=True)
class Random:
    """
    Attributes:
        seed: of what is drawn.
    """

    seed: int = 0

    @property
    def name(self) -> str:
        return "random"

    def allocate(self, problem: Problem) -> Answer:
        """Returns the plan, which exceeds limits where none was found within them."""

        def drawn(name: str, operator: str) -> float:
            return random.Random(f"{self.seed} {operator}").random()

        return _ordered(problem, halved(problem, drawn), self.name)


@dataclass(frozen=True)
class Hessian:
    """
    Attributes:
        sensitivity: that the method "hessian" found, of the model or of each class.
    """

    sensitivity: Sensitivity | Mapping[str, Sensitivity] = field(repr=False)

    @property
    def name(self) -> str:
        return "hessian"

    def allocate(self, problem: Problem) -> Answer:
        """Returns the plan, which exceeds limits where none was found within them; raises `ProfileError` where an operator is not known."""

        def known(name: str, operator: str) -> float:
            part = problem.classes[name]
            found = self.sensitivity if isinstance(self.sensitivity, Sensitivity) else self.sensitivity[name]
            return found.of(operator, part.runs(operator, part.choices[operator][0]))

        return _ordered(problem, halved(problem, known), self.name)


def halved(problem: Problem, narrowest: Callable[[str, str], float]) -> Indicator:
    """Returns what orders operators by a number for the narrowest format of each: half of it in the next wider one, nothing in FP32."""

    def indicator(name: str, operator: str, fmt: str) -> float:
        part = problem.classes[name]
        if FORMATS[part.runs(operator, fmt)].bits >= FP32_BITS:
            return 0.0
        return float(narrowest(name, operator) * 0.5 ** part.choices[operator].index(fmt))

    return indicator


FP32_BITS = FORMATS["fp32"].bits


def _ordered(problem: Problem, indicator: Indicator, name: str) -> Answer:
    try:
        return Greedy(indicator, name).allocate(problem)
    except PlanError:
        plans, judged = best(problem, uniforms(problem).values())
        return Answer(problem, plans, judged, name, notes=exceeded(problem, judged))
