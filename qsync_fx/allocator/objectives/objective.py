"""Interface of planning objectives, and the limits that formats stand for.

An objective says what a plan minimizes, the variance of the gradients or the seconds of a step, and
derives its limits from the `budget` and the `target` of a planning request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from qsync_fx.allocator.evaluator import PlanEvaluator
from qsync_fx.allocator.plan_result import PlanNote
from qsync_fx.allocator.problem import Plans, Problem, width
from qsync_fx.errors import PlanError, shown
from qsync_fx.formats import FORMATS, precision

Limit = str | float | None
"""A number, a format whose uniform plan defines the limit, or None for the objective's default."""

_MIXED: Final = 16
"""Maximum bits of a mixed-precision format."""


class Objective(ABC):
    """Planning objective; it has no state. `help` describes it in lists."""

    name: ClassVar[str]
    help: ClassVar[str]

    @abstractmethod
    def check(self, budget: Limit, target: Limit) -> None:
        """Raise `OptionError` or `PlanError` for a limit that the objective does not use.

        Names of formats are checked elsewhere.
        """

    def constrained(self, problem: Problem, budget: Limit, notes: list[PlanNote]) -> Problem:
        """Return the problem with the metric to minimize, and all limits but the seconds.

        The default minimizes the variance within the problem's limits of memory. Assumptions are
        appended to `notes`.
        """
        return problem

    @abstractmethod
    def seconds(self, problem: Problem, budget: Limit, target: Limit) -> float | None:
        """Return the limit of seconds per step, if any; called again for devices with a margin."""


def seconds_in(problem: Problem, limit: Limit) -> float:
    """Return a limit of seconds per step: a number, or the time of a uniform plan of a format."""
    if isinstance(limit, int | float):
        return float(limit)
    return PlanEvaluator(problem, uniform_in(problem, limit)).seconds


def uniform_in(problem: Problem, fmt: str | None) -> Plans:
    """Return uniform plans of all open classes in one format.

    A class without the format uses another format with as many bits. Default (None): the
    mixed-precision format of each class, its widest format of at most 16 bits.
    """
    if fmt is None:
        parts = {name: problem.classes[name] for name in problem.open}
        plans = {}
        for name, part in parts.items():
            narrow = [f for f in part.formats if FORMATS[f].bits <= _MIXED]
            plans[name] = part.uniform(max(narrow, key=width, default=part.lowest))
        return problem.completed(plans)
    requested = precision(fmt)
    result = {}
    for name in problem.open:
        part = problem.classes[name]
        equal = [other for other in part.formats if FORMATS[other].bits == requested.bits]
        if requested.name in part.formats:
            equal = [requested.name]
        if not equal:
            message = f"plans for {shown(name)} have neither {requested} nor a format as narrow"
            do = f"name one of {', '.join(part.formats)}, or allow {requested}"
            raise PlanError(message, do=do)
        result[name] = part.uniform(equal[0])
    return problem.completed(result)
