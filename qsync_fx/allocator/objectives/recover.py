"""Objective "recover", precision recovery from mixed precision on all classes."""

from __future__ import annotations

from typing import ClassVar, Final

from qsync_fx.allocator.objectives.objective import Limit, Objective, seconds_in
from qsync_fx.allocator.problem import Problem
from qsync_fx.errors import OptionError, PlanError


class Recover(Objective):
    """Least variance on all classes within the seconds of mixed precision.

    `budget` is the format of mixed precision, or `target` the seconds.
    """

    name: ClassVar[str] = "recover"
    help: ClassVar[str] = "least variance on all devices, within the seconds of mixed precision"

    def check(self, budget: Limit, target: Limit) -> None:
        if budget is not None and target is not None:
            do = "give the format of mixed precision as the budget, or what a step may take as the target"
            raise OptionError(
                "a budget and a target both say what a step may take", where="target", do=do
            )
        if isinstance(budget, int | float):
            do = "name the format of mixed precision, or give the seconds as the target"
            raise PlanError("what is recovered from is a format", where="budget", do=do)

    def seconds(self, problem: Problem, budget: Limit, target: Limit) -> float | None:
        return seconds_in(problem, budget if target is None else target)


OBJECTIVES: Final = (Recover(),)
