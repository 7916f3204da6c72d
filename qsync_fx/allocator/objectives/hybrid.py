"""Objective "hybrid", of QSync: slow devices get low precision, the fastest keep full precision."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from qsync_fx.allocator.evaluator import PlanEvaluator, beyond
from qsync_fx.allocator.objectives.objective import Limit, Objective, seconds_in
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind
from qsync_fx.allocator.problem import Problem
from qsync_fx.errors import OptionError


class Hybrid(Objective):
    """Least variance within `target` seconds; default: those of the narrowest formats."""

    name: ClassVar[str] = "hybrid"
    help: ClassVar[str] = "least variance, within the seconds of the narrowest formats"

    def check(self, budget: Limit, target: Limit) -> None:
        if budget is not None:
            do = "leave it out, or take the objective fastest: the least seconds within a variance"
            raise OptionError(
                "the plan of least variance has no variance to keep to", where="budget", do=do
            )

    def constrained(self, problem: Problem, budget: Limit, notes: list[PlanNote]) -> Problem:
        """Return the problem with the fastest of several classes fixed to its widest format.

        The class stays open if it lacks the memory. Speed is compared with all classes in their
        widest formats.
        """
        if len(problem.classes) == 1:
            return problem
        widest = {name: part.uniform(part.widest) for name, part in problem.classes.items()}
        judge = PlanEvaluator(problem, widest)
        quickest = min(problem.classes, key=judge.computing)
        part = problem.classes[quickest]
        if part.memory is not None and beyond(judge.peak(quickest) or 0, part.memory):
            return problem
        notes.append(PlanNote(PlanNoteKind.KEEPS, quickest, formats=(part.widest,)))
        return replace(
            problem, classes={**problem.classes, quickest: replace(part, kept=widest[quickest])}
        )

    def seconds(self, problem: Problem, budget: Limit, target: Limit) -> float | None:
        if target is None:
            return PlanEvaluator(problem, problem.uniform()).seconds
        return seconds_in(problem, target)


OBJECTIVES: Final = (Hybrid(),)
