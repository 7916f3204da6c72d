"""Plans that are looked at without a program: all of them where they are few, the paper's, and neighbours of the best one.

Invariant: a search knows a plan that is no worse afterwards.

The exact allocator: `MilpAllocator`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.evaluator import TOLERANCE, with_peaks
from qsync_fx.allocator.milp.binding_constraints import why_not
from qsync_fx.allocator.milp.linear_program import uncollected
from qsync_fx.allocator.milp.search import MilpSearch
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Problem
from qsync_fx.allocator.recovery import PrecisionRecovery
from qsync_fx.errors import PlanError

FEW: Final = 300
"""Plans, of which each is looked at where a program would be less sure."""
_LOOKS: Final = 500
"""Operators that are looked at in all when single ones are widened."""
_CHEAP: Final = 3
"""How many times as many are tried where most are ruled out by what is certain to be held."""
_ASKED: Final = 32
"""Choices up to which the paper's allocator is asked, too: it has the judge look at each step that it takes."""


def widen(search: MilpSearch) -> None:
    """Gives single operators of the best plan wider formats where the judge allows what the program did not know to be allowed."""
    problem, judge = search.problem, search.judge
    if search.best is None or not search.approximate or problem.tied or problem.least != "variance":
        return
    plans = search.best[0]
    judge.become(plans, search.best[1].codecs)
    wins = [
        (
            problem.weight(name) * (part.omega(operator, fmt) - part.omega(operator, wider)),
            name,
            operator,
            wider,
        )
        for name in problem.open
        for part in (problem.classes[name],)
        for operator, fmt in plans[name].items()
        for wider in part.choices[operator]
    ]
    tries = _LOOKS // max(1, sum(len(plans[name]) for name in problem.open))
    # What would win more than there is to win does not fit.
    most = search.best[1].variance * (1 + TOLERANCE) - (search.proved or 0.0)
    first = sorted((win for win in wins if 0 < win[0] <= most), key=lambda win: -win[0])
    for _, name, operator, wider in first[: _CHEAP * tries]:
        part = problem.classes[name]
        if part.omega(operator, wider) < part.omega(operator, judge.plans[name][operator]):
            judge.set(name, operator, wider)
            excluded = search.excluded
            tries -= not excluded
            if excluded or not judge.fits():
                judge.undo()
            if tries <= 0:
                break
    search.look(judge.plans)


def every(search: MilpSearch) -> bool:
    """Looks at all plans where they are few and the program only takes after the judge; returns whether it did."""
    choices = {
        (name, operator): entry
        for name in search.problem.open
        for operator, entry in search.problem.classes[name].choices.items()
    }
    codecs = [tuple(by) for by in search.judge.options.coded]
    many = math.prod(map(len, (*choices.values(), *codecs)))
    if search.problem.tied or not search.approximate or many > FEW:
        return False
    for picked in itertools.product(*choices.values()):
        plans: dict[str, dict[str, str]] = {name: {} for name in search.problem.open}
        for (name, operator), fmt in zip(choices, picked, strict=True):
            plans[name][operator] = fmt
        for coded in itertools.product(*codecs):
            search.look(plans, coded)
    search.bound = search.best[1].value(search.problem) if search.best is not None else search.bound
    return True


def few(search: MilpSearch) -> bool:
    """Whether so few operators are open to choice that the judge can be asked at every step."""
    return sum(len(part.choices) for part in search.problem.classes.values()) <= _ASKED


def begin_elsewhere(search: MilpSearch) -> None:
    """Looks at the plan of the paper's allocator, which asks the judge at every step: what was learned here may hide its like."""
    if not few(search):
        return
    with contextlib.suppress(PlanError):
        search.look(PrecisionRecovery().allocate(search.problem).plans, search.judge.options.plain)


GAP: Final = 1e-4
ROUNDS: Final = 6
SECONDS: Final = 60.0


@dataclass(frozen=True)
class MilpAllocator:
    """
    Attributes:
        gap: that may be left between the plan and the bound, of what is least.
        rounds: how often the judge is learned from, at most.
        seconds: after which a program is given up, with the best plan found so far.
    """

    gap: float = GAP
    rounds: int = ROUNDS
    seconds: float = SECONDS

    @property
    def name(self) -> str:
        return "milp"

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns the plan that is best; see `Allocator`."""
        with uncollected():
            return self._allocated(problem)

    def _allocated(self, problem: Problem) -> PlanResult:
        began = time.perf_counter()
        search = MilpSearch(problem, self.gap, self.seconds)
        if search.approximate:
            search.bounded()
        # Where little is chosen, looking twice takes little.
        if not search.near and (not search.lean(self.rounds) or few(search)):
            search.run(self.rounds)
        if search.approximate:
            search.sharpen()
        full = not search.approximate or (not search.near and every(search))
        if not full and not search.near:
            begin_elsewhere(search)
            widen(search)
            search.bounded()
        if search.best is None:
            raise why_not(search)
        bound = search.bound if full else search.proved
        plans = search.best[0]
        judged = with_peaks(problem, *search.best)
        value = judged.value(problem)
        took = time.perf_counter() - began
        notes = (
            ()
            if full or search.near
            else (PlanNote(PlanNoteKind.RECKONED, numbers={problem.least: search.bound}),)
        )
        available = None if bound is None else min(bound, value)
        return PlanResult(
            problem,
            plans,
            judged,
            self.name,
            available,
            took,
            tuple(search.rounds),
            (*search.notes, *notes),
        )
