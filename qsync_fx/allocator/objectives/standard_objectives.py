"""Objectives of QSync and its baselines: "hybrid", "fastest" and "recover"; and "cost"."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from qsync_fx.allocator.evaluator import PlanEvaluator, beyond
from qsync_fx.allocator.objectives.objective import Limit, Objective, seconds_in, uniform_in
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind
from qsync_fx.allocator.problem import Problem
from qsync_fx.errors import OptionError, PlanError, shown


class Hybrid(Objective):
    """Least variance within `target` seconds; default: those of the narrowest formats."""

    name: ClassVar[str] = "hybrid"
    help: ClassVar[str] = "least variance, within the seconds of the narrowest formats"

    def check(self, budget: Limit, target: Limit) -> None:
        if budget is not None:
            do = "leave it out, or use the objective fastest: the least seconds within a variance"
            message = "the variance is minimized, and cannot be limited"
            raise OptionError(message, where="budget", do=do)

    def constrained(self, problem: Problem, budget: Limit, notes: list[PlanNote]) -> Problem:
        """Return the problem with the fastest of several classes fixed to its widest format.

        The class stays open if it lacks the memory. Speed is compared with all classes in their
        widest formats.
        """
        if len(problem.classes) == 1:
            return problem
        widest = {name: part.uniform(part.widest) for name, part in problem.classes.items()}
        evaluator = PlanEvaluator(problem, widest)
        quickest = min(problem.classes, key=evaluator.computing)
        part = problem.classes[quickest]
        if part.memory is not None and beyond(evaluator.peak(quickest) or 0, part.memory):
            return problem
        notes.append(PlanNote(PlanNoteKind.KEEPS, quickest, formats=(part.widest,)))
        classes = {**problem.classes, quickest: replace(part, fixed_plan=widest[quickest])}
        return replace(problem, classes=classes)

    def seconds(self, problem: Problem, budget: Limit, target: Limit) -> float | None:
        if target is None:
            return PlanEvaluator(problem, problem.uniform()).seconds
        return seconds_in(problem, target)


class Fastest(Objective):
    """Least seconds within the variance `budget`; default: that of mixed precision."""

    name: ClassVar[str] = "fastest"
    help: ClassVar[str] = "least seconds, within the variance of mixed precision"

    def check(self, budget: Limit, target: Limit) -> None:
        if target is not None:
            do = "leave it out, or use the objective hybrid: the least variance within a time"
            message = "the seconds are minimized, and cannot be limited"
            raise OptionError(message, where="target", do=do)

    def constrained(self, problem: Problem, budget: Limit, notes: list[PlanNote]) -> Problem:
        if not isinstance(budget, int | float):
            budget = problem.variance_of(uniform_in(problem, budget))
        return replace(problem, least="seconds", variance=float(budget))

    def seconds(self, problem: Problem, budget: Limit, target: Limit) -> float | None:
        return None


class Cost(Fastest):
    """Least cost per sample within the variance `budget`, by default of mixed precision.

    `find_plan` compares the plans of all subsets of the device classes. On the same devices with
    the same samples, the fastest plan costs least.
    """

    name: ClassVar[str] = "cost"
    help: ClassVar[str] = "least cost per sample, within the variance of mixed precision"

    def constrained(self, problem: Problem, budget: Limit, notes: list[PlanNote]) -> Problem:
        for name, device in problem.cluster.devices.items():
            if device.price_per_hour is None or device.batch is None:
                lacking = "price_per_hour" if device.price_per_hour is None else "batch"
                message = f"the cost per sample on {shown(name)} is unknown without {lacking}"
                do = f"set it in the file of the cluster: {lacking} = ..."
                raise PlanError(message, where=f"devices.{name}.{lacking}", do=do)
        return super().constrained(problem, budget, notes)


class Recover(Objective):
    """Least variance on all classes within the seconds of mixed precision, or `target` seconds."""

    name: ClassVar[str] = "recover"
    help: ClassVar[str] = "least variance on all devices, within the seconds of mixed precision"

    def check(self, budget: Limit, target: Limit) -> None:
        if budget is not None and target is not None:
            do = "give the format of mixed precision as the budget, or seconds as the target"
            message = "a budget and a target cannot be combined: both limit the seconds of a step"
            raise OptionError(message, where="target", do=do)
        if isinstance(budget, int | float):
            do = "name the format of mixed precision, or give the seconds as the target"
            raise PlanError("the budget of recovery is a format", where="budget", do=do)

    def seconds(self, problem: Problem, budget: Limit, target: Limit) -> float | None:
        return seconds_in(problem, budget if target is None else target)


OBJECTIVES: Final = (Cost(), Fastest(), Hybrid(), Recover())
