"""Exact allocator `MilpAllocator`, with plans that are evaluated without a program.

If the estimate of the search is approximate, the allocator also evaluates all plans if they are few
(`enumerate_plans`), the plan of precision recovery (`evaluate_precision_recovery`), and single
changes of the best plan (`widen_operators`). These steps never make the best plan worse.
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

MAX_ENUMERATED_PLANS: Final = 300
"""Maximum number of plans to enumerate if the estimate is approximate."""
_WIDENING_BUDGET: Final = 500
"""Maximum number of operators times evaluations in `widen_operators`."""
_ATTEMPTS_PER_EVALUATION: Final = 3
"""Ratio of attempts to evaluations in widening: the memory bound excludes most attempts."""


def widen_operators(search: MilpSearch) -> None:
    """Widen single operators of the best plan if the evaluator accepts more than the program."""
    problem, evaluator, state = search.problem, search.evaluator, search.state
    incumbent = state.incumbent
    if incumbent is None or not state.is_approximate:
        return
    if problem.tied or problem.least != "variance":
        return
    evaluator.set_plans(incumbent.plans, incumbent.evaluation.codecs)
    changes = [
        (
            problem.weight(name) * (part.omega(operator, fmt) - part.omega(operator, wider)),
            name,
            operator,
            wider,
        )
        for name in problem.open
        for part in (problem.classes[name],)
        for operator, fmt in incumbent.plans[name].items()
        for wider in part.choices[operator]
    ]
    operators = sum(len(incumbent.plans[name]) for name in problem.open)
    evaluations = _WIDENING_BUDGET // max(1, operators)
    # A gain larger than the distance to the bound is infeasible.
    most = incumbent.evaluation.variance * (1 + TOLERANCE) - (state.lower_bound or 0.0)
    gains = sorted((change for change in changes if 0 < change[0] <= most), key=lambda it: -it[0])
    for _, name, operator, wider in gains[: _ATTEMPTS_PER_EVALUATION * evaluations]:
        part = problem.classes[name]
        if part.omega(operator, wider) < part.omega(operator, evaluator.plans[name][operator]):
            evaluator.set(name, operator, wider)
            excluded = search.exceeds_memory_bound()
            evaluations -= not excluded
            if excluded or not evaluator.fits():
                evaluator.undo()
            if evaluations <= 0:
                break
    search.evaluate(evaluator.plans)


def enumerate_plans(search: MilpSearch) -> bool:
    """Evaluate all plans if there are few; return whether it did."""
    problem = search.problem
    choices = {
        (name, operator): formats
        for name in problem.open
        for operator, formats in problem.classes[name].choices.items()
    }
    codecs = [tuple(by) for by in search.evaluator.options.coded]
    count = math.prod(map(len, (*choices.values(), *codecs)))
    if problem.tied or count > MAX_ENUMERATED_PLANS:
        return False
    for formats in itertools.product(*choices.values()):
        plans: dict[str, dict[str, str]] = {name: {} for name in problem.open}
        for (name, operator), fmt in zip(choices, formats, strict=True):
            plans[name][operator] = fmt
        for coded in itertools.product(*codecs):
            search.evaluate(plans, coded)
    return True


def evaluate_precision_recovery(search: MilpSearch) -> None:
    """Evaluate the plan of precision recovery; learned costs can hide similar plans."""
    if search.is_small:
        with contextlib.suppress(PlanError):
            plans = PrecisionRecovery().allocate(search.problem).plans
            search.evaluate(plans, search.evaluator.options.plain)


GAP: Final = 1e-4
ROUNDS: Final = 6
SECONDS: Final = 60.0


@dataclass(frozen=True)
class MilpAllocator:
    """Allocator with a proved bound: mixed-integer linear programs and exact evaluation.

    Attributes:
        gap: allowed gap between plan and bound, relative to the objective.
        rounds: maximum number of iterations that learn from the evaluator.
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
        state = search.state
        search.solve(self.rounds)
        enumerated = False
        if state.is_approximate and not search.is_within_gap():
            enumerated = enumerate_plans(search)
            if not enumerated:
                evaluate_precision_recovery(search)
                widen_operators(search)
                search.compute_lower_bound()
        if state.incumbent is None:
            raise why_not(search)
        plans = state.incumbent.plans
        evaluation = with_peaks(problem, plans, state.incumbent.evaluation)
        value, bound = evaluation.value(problem), state.lower_bound
        notes = list(state.notes)
        if enumerated:
            bound = value
        elif not state.is_approximate:
            bound = state.program_bound
        elif not search.is_within_gap():
            numbers: dict[str, float] = {problem.least: state.program_bound}
            notes.append(PlanNote(PlanNoteKind.RECKONED, numbers=numbers))
        return PlanResult(
            problem,
            plans,
            evaluation,
            self.name,
            None if bound is None else min(bound, value),
            time.perf_counter() - began,
            tuple(state.iterations),
            tuple(notes),
        )
