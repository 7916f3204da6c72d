"""Objective "fastest": least seconds per step within a variance."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from qsync_fx.allocator.objectives.objective import Limit, Objective, uniform_in
from qsync_fx.allocator.plan_result import PlanNote
from qsync_fx.allocator.problem import Problem
from qsync_fx.errors import OptionError


class Fastest(Objective):
    """Least seconds within the variance `budget`; default: that of mixed precision."""

    name: ClassVar[str] = "fastest"
    help: ClassVar[str] = "least seconds, within the variance of mixed precision"

    def check(self, budget: Limit, target: Limit) -> None:
        if target is not None:
            do = "leave it out, or take the objective hybrid: the least variance within a time"
            raise OptionError("the fastest plan has no time to keep to", where="target", do=do)

    def constrained(self, problem: Problem, budget: Limit, notes: list[PlanNote]) -> Problem:
        allowed = (
            budget
            if isinstance(budget, int | float)
            else problem.variance_of(uniform_in(problem, budget))
        )
        return replace(problem, least="seconds", variance=float(allowed))

    def seconds(self, problem: Problem, budget: Limit, target: Limit) -> float | None:
        return None


OBJECTIVES: Final = (Fastest(),)
