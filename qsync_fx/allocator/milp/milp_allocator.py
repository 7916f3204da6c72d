"""Exact allocator `MilpAllocator`, with plans that are evaluated without a program.

For approximate programs, the allocator also evaluates all plans if they are few (`every`), the plan
of precision recovery (`begin_elsewhere`), and single changes of the best plan (`widen`). These
steps never make the best plan worse.
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
"""Maximum number of plans to enumerate if the program is approximate."""
_LOOKS: Final = 500
"""Budget of `widen`: maximum number of operators times evaluations."""
_CHEAP: Final = 3
"""Ratio of attempts to evaluations in `widen`: the memory bound excludes most attempts."""
_ASKED: Final = 32
"""Number of adjustable operators up to which precision recovery runs: it evaluates each step."""


def widen(search: MilpSearch) -> None:
    """Widen single operators of the best plan if the evaluator accepts more than the program."""
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
    # A gain larger than the distance to the bound is infeasible.
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
    """Evaluate all plans if they are few and the program is approximate; return whether it did."""
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
    """Return whether there are few enough adjustable operators to evaluate every step."""
    return sum(len(part.choices) for part in search.problem.classes.values()) <= _ASKED


def begin_elsewhere(search: MilpSearch) -> None:
    """Evaluate the plan of precision recovery; learned costs can hide similar plans."""
    if not few(search):
        return
    with contextlib.suppress(PlanError):
        search.look(PrecisionRecovery().allocate(search.problem).plans, search.judge.options.plain)


GAP: Final = 1e-4
ROUNDS: Final = 6
SECONDS: Final = 60.0


@dataclass(frozen=True)
class MilpAllocator:
    """Allocator with a proved bound: mixed-integer linear programs and exact evaluation.

    Attributes:
        gap: allowed gap between plan and bound, relative to the objective.
        rounds: maximum number of rounds that learn from the evaluator.
        seconds: time limit of each program; the best plan so far is used after it.
    """

    gap: float = GAP
    rounds: int = ROUNDS
    seconds: float = SECONDS

    @property
    def name(self) -> str:
        return "milp"

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the best plan; see `Allocator`."""
        with uncollected():
            return self._allocated(problem)

    def _allocated(self, problem: Problem) -> PlanResult:
        began = time.perf_counter()
        search = MilpSearch(problem, self.gap, self.seconds)
        if search.approximate:
            search.bounded()
        # With few operators a second search is inexpensive.
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
