"""Exact allocator `MilpAllocator`, and the error that names the limits of an infeasible problem."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

from qsync_fx.allocator.evaluator import beyond, with_peaks
from qsync_fx.allocator.feasibility import megabytes
from qsync_fx.allocator.milp.build_and_solve import Constraints
from qsync_fx.allocator.milp.search import MilpSearch
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Problem
from qsync_fx.errors import PlanError, shown
from qsync_fx.formatting import duration

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
        began = time.perf_counter()
        search = MilpSearch(problem, self.gap, self.seconds)
        search.solve(self.rounds)
        state = search.state
        if state.incumbent is None:
            raise infeasible(search)
        plans = state.incumbent.plans
        evaluation = with_peaks(problem, plans, state.incumbent.evaluation)
        bound, notes = state.lower_bound, list(state.notes)
        if not state.is_approximate:
            bound = state.program_bound
        elif not search.is_within_gap():
            numbers: dict[str, float] = {problem.least: state.program_bound}
            notes.append(PlanNote(PlanNoteKind.RECKONED, numbers=numbers))
        if bound is not None:
            bound = min(bound, evaluation.value(problem))
        took, iterations = time.perf_counter() - began, tuple(state.iterations)
        return PlanResult(
            problem, plans, evaluation, self.name, bound, took, iterations, tuple(notes)
        )


def infeasible(search: MilpSearch) -> PlanError:
    """Return the error on the first limit that no plan meets, with numbers of evaluated plans."""
    problem = search.problem
    memory = {name: problem.classes[name].memory for name in problem.open}
    for name, limit in memory.items():
        if limit is None:
            continue
        search.evaluate_best(Constraints(), "memory", [name])
        if beyond(peak := search.state.smallest_peak_bytes[name], limit):
            message = f"a step on {shown(name)} takes {megabytes(peak)} at least"
            message += f", {megabytes(peak - limit)} more than allowed"
            do = f"allow {megabytes(peak)}, or give it a smaller batch"
            where = f"memory of {shown(name)}, {megabytes(limit)}"
            return PlanError(message, where=where, do=do)
    if (limit := problem.variance) is not None:
        variance = search.evaluate_best(Constraints(), "variance").variance
        if beyond(variance, limit):
            message = f"the variance is {variance:.4g} at least, "
            message += f"{variance - limit:.4g} more than allowed"
            do = "allow more, or wider formats"
            return PlanError(message, where=f"variance, {limit:.4g}", do=do)
    limits = [f"memory of {shown(name)}" for name, limit in memory.items() if limit is not None]
    limits += ["variance"] if problem.variance is not None else []
    if (limit := problem.seconds) is not None:
        seconds = search.evaluate_best(Constraints(), "seconds").seconds
        where = f"seconds of a step, {duration(limit)}"
        if beyond(seconds, limit):
            message = f"a step takes {duration(seconds)} at least"
            message += f", {duration(seconds - limit)} more than allowed"
            return PlanError(message, where=where, do=f"allow {duration(seconds)} a step")
        limits.insert(0, where)
    do = "allow more of one of them"
    if problem.seconds is not None:
        others = replace(search.state.limits, seconds=None)
        seconds = search.evaluate_best(others, "seconds").seconds
        do = f"allow {duration(seconds)} a step, or more of another limit"
    message = "no plan was found that meets all limits together; each limit alone can be met"
    return PlanError(message, where=" and ".join(limits), do=do)
