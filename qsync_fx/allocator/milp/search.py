"""MILP search: solve a program, evaluate its plans, refine the model of costs, repeat.

Programs are built from two models of costs. The estimate contains one time per operator state and
linearized memory, both learned from evaluated plans (`refine_model`); it is exact if times do not
depend on neighbours and memory is not limited. The bound contains lower bounds on times
(`NeighbourTerms`) and on memory (`MemoryLowerBound`), which are tightened by cuts. Every plan of a
program is evaluated by `PlanEvaluator`, and the best plan that meets all limits is the incumbent.

States of a search, and the methods that lead from one to the next:

    without memory limits (`solve_without_memory_limits`)

        Started --compute_lower_bound--> Bounded --iterate_to_fixed_point--> Converged
                  only if times depend               repeat: solve the estimate,
                  on neighbours                      refine it, tighten the limits

        Converged without incumbent --evaluate_uniform_plans--> Bounded, once

    with memory limits (`solve_with_memory_cuts`)

        Started --compute_lower_bound--> Bounded --correct_memory_limits--> Corrected
                  repeat: solve the bound,           repeat: solve with the bound on memory,
                  add memory cuts,                   reduce the limits by the last excess,
                  add no-good cuts                   bisect if they alternate

        Corrected --iterate_to_fixed_point--> Converged --solve above the limits--> Converged
                    if there is no feasible plan,         once, if not within the gap
                    or few operators

    any state --is_within_gap--> Finished
    Corrected, Converged --tighten_bound--> Finished

Invariant: the incumbent meets all limits by `PlanEvaluator`. `SearchState.lower_bound` is a bound
over all plans. `SearchState.program_bound` is the bound of the last program only: if the estimate
is approximate, other plans can be below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from qsync_fx.allocator.codec_choice import Codecs
from qsync_fx.allocator.evaluator import TOLERANCE, CachedTimes, Evaluation, PlanEvaluator, beyond
from qsync_fx.allocator.milp.build_and_solve import Constraints, Solution, find, together
from qsync_fx.allocator.milp.format_variables import OperatorCosts, StateCosts
from qsync_fx.allocator.milp.linearized_memory import LinearizedMemory
from qsync_fx.allocator.milp.memory_bound.lower_bound import LowerBoundTerm, MemoryLowerBound
from qsync_fx.allocator.milp.neighbour_terms import NeighbourTerms
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, SolverIteration
from qsync_fx.allocator.problem import Plans, Problem, uniforms

_MEMORY_TOLERANCE: Final = 2e-3
"""Relative error of the memory estimate above which another iteration is worthwhile."""
_MEMORY_CUTS: Final = 8
"""Maximum number of solves that add memory cuts."""
_NO_GOOD_CUTS: Final = 24
"""Maximum number of solves that add no-good cuts."""
_NO_GOOD_GAP: Final = 0.02
"""Gap up to which no-good cuts are added; above it too many plans are left."""
_SOLVER_GAP_RATIO: Final = 3
"""Ratio of gaps up to which the solver's own gap may be all that is missing."""
_MEMORY_RELAXATION: Final = 0.05
"""Relative relaxation of the memory limits in one additional solve."""
_FEW_OPERATORS: Final = 32
"""Maximum number of adjustable operators of a small problem."""


@dataclass(frozen=True)
class Incumbent:
    """Best evaluated plans that meet all limits."""

    plans: Plans
    evaluation: Evaluation


@dataclass
class SearchState:
    """State of a search. Only methods of `MilpSearch` change it.

    Attributes:
        limits: limits of the estimate; `tighten_limits` reduces them.
        bound_limits: limits of the bound; `without` contains the no-good cuts.
        state_costs: learned time of each operator state, by open class.
        memory_estimates: learned live bytes, by open class with a memory limit.
        memory_bounds: lower bounds on live bytes with their cuts, by open class with a memory
            limit; empty until the first lower bound.
        incumbent: best plans that meet all limits; None if none were found.
        lower_bound: proved lower bound of the objective over all plans; None if unknown.
        program_bound: bound of the last program in `iterations`.
        smallest_peak_bytes: smallest evaluated peak memory, by class.
        iterations: solved programs with the evaluations of their plans.
        notes: remarks for the result.
    """

    limits: Constraints
    bound_limits: Constraints
    state_costs: Mapping[str, StateCosts]
    memory_estimates: Mapping[str, LinearizedMemory]
    memory_bounds: dict[str, MemoryLowerBound] = field(default_factory=dict)
    incumbent: Incumbent | None = None
    lower_bound: float | None = None
    program_bound: float = 0.0
    smallest_peak_bytes: dict[str, int] = field(default_factory=dict)
    iterations: list[SolverIteration] = field(default_factory=list)
    notes: list[PlanNote] = field(default_factory=list)

    @classmethod
    def of(cls, problem: Problem) -> SearchState:
        """Return the state before any plan is evaluated."""
        memory = {
            name: limit
            for name in problem.open
            if (limit := problem.classes[name].memory) is not None
        }
        limits = Constraints(problem.seconds, memory, problem.variance)
        return cls(
            limits,
            limits,
            {name: StateCosts(problem.classes[name]) for name in problem.open},
            {name: LinearizedMemory() for name in memory},
        )

    @property
    def is_approximate(self) -> bool:
        """Whether the estimate is approximate: limited memory, or times depend on neighbours."""
        return bool(self.memory_estimates) or any(
            costs.differ for costs in self.state_costs.values()
        )

    def is_within_gap(self, problem: Problem, gap: float) -> bool:
        """Return whether the incumbent is proved to be within a relative gap of the optimum."""
        if self.incumbent is None or self.lower_bound is None:
            return False
        value = self.incumbent.evaluation.value(problem)
        return value - self.lower_bound <= gap * value


@dataclass(frozen=True)
class _Iterate:
    """Evaluated solution of a program.

    Attributes:
        plans: plans of all classes.
        codecs: codec of each bucket.
        excess: excess over each violated limit.
        new_costs: whether the evaluation revealed costs that the estimate lacked.
    """

    plans: Plans
    codecs: Codecs
    excess: Mapping[str, float]
    new_costs: bool


class MilpSearch:
    """Search for the best plans of all open classes, with a proved lower bound.

    Args:
        problem: the planning problem.
        gap: allowed relative gap between incumbent and lower bound.
        seconds: time limit of each program.

    Attributes:
        problem: the planning problem, with cached times.
        evaluator: evaluator with the plans evaluated last.
        state: current state of the search.
    """

    def __init__(self, problem: Problem, gap: float, seconds: float) -> None:
        # Peak memory is expensive to evaluate and needed only if it is limited.
        self.problem = replace(
            problem,
            classes={
                name: replace(
                    part,
                    times=CachedTimes(part.times),
                    training=part.training if part.memory else None,
                )
                for name, part in problem.classes.items()
            },
        )
        self.gap, self.seconds = gap, seconds
        self.evaluator = PlanEvaluator(self.problem, problem.uniform())
        self.state = SearchState.of(self.problem)
        if self.state.memory_estimates:
            self.evaluate_uniform_plans()
        else:
            self.evaluate(problem.uniform())
        self.refine_model()

    @property
    def is_small(self) -> bool:
        """Whether there are few adjustable operators, so that extra evaluations are inexpensive."""
        classes = self.problem.classes.values()
        return sum(len(part.choices) for part in classes) <= _FEW_OPERATORS

    def is_within_gap(self) -> bool:
        """Return whether the incumbent is proved to be within the requested gap."""
        return self.state.is_within_gap(self.problem, self.gap)

    def exceeds_memory_bound(self) -> bool:
        """Return whether the memory bound of the current plans exceeds a limit."""
        return any(
            beyond(
                self.state.memory_bounds[name].of(self.evaluator.states(name).names),
                limit,
            )
            for name, limit in self.state.bound_limits.memory.items()
            if name in self.state.memory_bounds
        )

    # Strategies

    def solve(self, max_iterations: int) -> None:
        """Run the strategy for the limits of the problem, with `max_iterations` in each loop."""
        if self.state.memory_estimates:
            self.solve_with_memory_cuts(max_iterations)
        else:
            self.solve_without_memory_limits(max_iterations)

    def solve_without_memory_limits(self, max_iterations: int) -> None:
        """Bound the objective if times depend on neighbours, then iterate the estimate."""
        if self.state.is_approximate:
            self.compute_lower_bound()
        if not self.is_within_gap():
            self.iterate_with_restart(max_iterations)
        if self.state.is_approximate:
            self.tighten_bound()

    def iterate_with_restart(self, max_iterations: int) -> None:
        """Iterate the estimate; without a feasible plan, once more from the uniform plans."""
        self.iterate_to_fixed_point(max_iterations)
        if self.state.incumbent is None:
            self.evaluate_uniform_plans()
            self.refine_model()
            self.iterate_to_fixed_point(max_iterations)

    def solve_with_memory_cuts(self, max_iterations: int) -> None:
        """Bound the objective with cuts, then solve with corrected and with estimated memory."""
        self.compute_lower_bound()
        if not self.is_within_gap():
            feasible = self.correct_memory_limits(max_iterations)
            # With few operators a second search is inexpensive.
            if not feasible or self.is_small:
                self.iterate_to_fixed_point(max_iterations)
                if self.state.incumbent is not None and not self.is_within_gap():
                    self.solve_above_memory_limits()
                    self.iterate_to_fixed_point(max_iterations)
        self.tighten_bound()

    # Evaluation of plans

    def evaluate(self, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
        """Evaluate plans, and make them the incumbent if they are the best so far.

        If `codecs` is None, the codecs of the buckets do not change.
        """
        evaluation = self.evaluator.set_plans(plans, codecs)
        smallest = self.state.smallest_peak_bytes
        for name, metrics in evaluation.classes.items():
            if metrics.peak_bytes is not None:
                smallest[name] = min(metrics.peak_bytes, smallest.get(name, metrics.peak_bytes))
        incumbent = self.state.incumbent
        if not evaluation.exceeds(self.problem) and (
            incumbent is None or self._is_better(evaluation, incumbent.evaluation)
        ):
            self.state.incumbent = Incumbent(self.evaluator.plans, evaluation)
        return evaluation

    def evaluate_uniform_plans(self) -> None:
        """Evaluate all uniform plans and refine the estimate at each of them.

        The evaluator ends at the best feasible plan, else at the narrowest.
        """
        for plans in uniforms(self.problem).values():
            self.evaluate(plans)
            self.refine_model()
        incumbent = self.state.incumbent
        self.evaluate(self.problem.uniform() if incumbent is None else incumbent.plans)

    def refine_model(self) -> bool:
        """Learn times and memory of the current plans; return whether any are new.

        The estimate is exact for the plans that were learned last.
        """
        new = False
        for name in self.problem.open:
            states = self.evaluator.states(name)
            new |= self.state.state_costs[name].learn(states.names)
            if name in self.state.memory_estimates:
                memory = self.evaluator.memory(name)
                assert memory is not None
                error = self.state.memory_estimates[name].learn(
                    states, self._passes_peak_bytes(name), memory.tasks
                )
                new |= error > _MEMORY_TOLERANCE
        return new

    def _is_better(self, evaluation: Evaluation, other: Evaluation) -> bool:
        """Return whether the objective is less, or the other metrics at an equal objective."""
        first, second = evaluation.value(self.problem), other.value(self.problem)
        if abs(first - second) > TOLERANCE * max(first, second):
            return first < second
        return (evaluation.variance, evaluation.seconds) < (other.variance, other.seconds)

    def _passes_peak_bytes(self, name: str) -> float:
        """Return the peak of both passes in bytes; optimizer memory does not depend on the plan."""
        memory = self.evaluator.memory(name)
        assert memory is not None
        passes = max(moment.bytes for moment in memory.worst.moments if moment.place != "optimizer")
        return passes + memory.peak_bytes - memory.worst.peak.bytes

    # Solution of the estimate

    def iterate_to_fixed_point(self, max_iterations: int) -> None:
        """Solve, evaluate and refine the estimate, until no new costs are revealed.

        Plans that exceed a limit although all of their costs were known tighten the limits.
        """
        visited: list[tuple[Plans, Codecs]] = []
        for _ in range(max_iterations):
            if self.is_within_gap() or (iterate := self._solve_estimate()) is None:
                return
            result = iterate.plans, iterate.codecs
            if result in visited or not (iterate.excess or iterate.new_costs):
                if not iterate.excess:
                    return
                self.tighten_limits(iterate.excess)
            visited.append(result)

    def solve_above_memory_limits(self) -> None:
        """Solve the estimate once with relaxed memory limits, as it can be too high."""
        limits = self.state.limits
        relaxed = {name: limit * (1 + _MEMORY_RELAXATION) for name, limit in limits.memory.items()}
        self.state.limits = replace(limits, memory=relaxed)
        self._solve_estimate()
        self.state.limits = limits

    def correct_memory_limits(self, max_iterations: int) -> bool:
        """Solve with memory bounds, and limits reduced by the last excess over these bounds.

        The excess of the peak over the lower bound depends little on the plan, so that few
        iterations lead to good plans. If a feasible and an infeasible limit alternate, the limit is
        bisected. Returns whether any plan met all limits.
        """
        visited: list[tuple[Plans, Codecs]] = []
        solved: list[Mapping[str, float]] = []
        feasible: Mapping[str, float] | None = None
        infeasible: Mapping[str, float] | None = None
        for _ in range(max_iterations):
            memory = {
                name: limit - self._peak_above_bound(name)
                for name, limit in self.state.bound_limits.memory.items()
            }
            if memory in solved or (visited and visited[-1] in visited[:-1]):
                if feasible is None or infeasible is None:
                    break
                if self.limits_converged(feasible, infeasible):
                    break
                memory = {name: (feasible[name] + infeasible[name]) / 2 for name in memory}
            solved.append(memory)
            iterate = self._evaluate_solution(
                self._solve_program(
                    self.evaluator.plans,
                    self.state.state_costs,
                    self.state.memory_bounds,
                    replace(self.state.bound_limits, memory=memory),
                )
            )
            if iterate is None:
                break
            if iterate.excess:
                infeasible = memory
            else:
                feasible = memory
            if self.is_within_gap():
                break
            visited.append((iterate.plans, iterate.codecs))
        return feasible is not None

    def limits_converged(self, first: Mapping[str, float], second: Mapping[str, float]) -> bool:
        """Return whether memory limits are so close that further bisection is pointless."""
        return all(
            abs(first[name] - second[name]) <= _MEMORY_TOLERANCE / 4 * limit
            for name, limit in self.state.bound_limits.memory.items()
        )

    def tighten_limits(self, excess: Mapping[str, float]) -> None:
        """Tighten the limits by the excess of a plan whose costs were all known."""
        limits = self.state.limits
        if limits.seconds is not None and "seconds" in excess:
            limits = replace(limits, seconds=limits.seconds - excess["seconds"])
        memory = {
            name: limit - excess.get(f"memory {name}", 0.0) for name, limit in limits.memory.items()
        }
        self.state.limits = replace(limits, memory=memory)

    def _solve_estimate(self) -> _Iterate | None:
        """Solve the estimate once and evaluate its plans; None if it has none."""
        incumbent = self.state.incumbent
        start = self.evaluator.plans if incumbent is None else incumbent.plans
        solution = self.solve_estimate_from(start)
        if solution.infeasible and incumbent is not None:
            # Costs learned from other plans can hide a plan that meets the limits.
            self.evaluate(incumbent.plans, incumbent.evaluation.codecs)
            self.refine_model()
            solution = self.solve_estimate_from(incumbent.plans)
        return self._evaluate_solution(solution)

    def solve_estimate_from(self, start: Plans) -> Solution:
        """Return the solution of the estimate, given plans for a warm start."""
        state = self.state
        return self._solve_program(start, state.state_costs, state.memory_estimates, state.limits)

    def _evaluate_solution(self, solution: Solution) -> _Iterate | None:
        """Evaluate the plans of a solution, refine the estimate, and record the iteration."""
        if solution.stopped:
            self.state.notes.append(
                PlanNote(PlanNoteKind.STOPPED, numbers={"seconds": self.seconds})
            )
        if solution.plans is None:
            return None
        plans = self.problem.completed(solution.plans)
        evaluation = self.evaluate(plans, solution.codecs)
        excess, new_costs = evaluation.exceeds(self.problem), self.refine_model()
        self.state.program_bound = solution.bound
        self.state.iterations.append(
            SolverIteration(evaluation, solution.bound, fits=not excess, learned=new_costs)
        )
        return _Iterate(plans, evaluation.codecs, excess, new_costs)

    def _peak_above_bound(self, name: str) -> float:
        """Return the difference between peak memory and its lower bound for the last plan."""
        bound = self.state.memory_bounds[name].of(self.evaluator.states(name).names)
        return (self.evaluator.peak(name) or 0) - bound

    # Lower bound

    def compute_lower_bound(self) -> float | None:
        """Improve the lower bound with cuts, and return it; None if unknown.

        A plan of the bound that exceeds a memory limit is cut off: by the moments at which its
        memory bound exceeds the limit, or by a no-good cut if there are none.
        """
        state, new = self.state, self.state.lower_bound is None
        for name, estimate in state.memory_estimates.items():
            part, memory = self.problem.classes[name], self.evaluator.memory(name)
            if name not in state.memory_bounds and memory is not None:
                state.memory_bounds[name] = MemoryLowerBound(part, memory.expected)
            new |= state.memory_bounds[name].add(estimate.places(part.graph))
        if not (self.add_memory_cuts() or new or state.is_within_gap(self.problem, _NO_GOOD_GAP)):
            return state.lower_bound
        memory_cuts = no_good_cuts = 0
        while memory_cuts < _MEMORY_CUTS and no_good_cuts < _NO_GOOD_CUTS:
            solution = self.solve_bound(self.gap)
            if solution.plans is None:
                break
            state.lower_bound = max(solution.bound, state.lower_bound or 0.0)
            evaluation = self.evaluate(self.problem.completed(solution.plans), solution.codecs)
            self.refine_model()
            if self.is_within_gap():
                break
            if self.add_memory_cuts():
                memory_cuts += 1
            elif state.is_within_gap(self.problem, _NO_GOOD_GAP) and self.add_no_good_cuts(
                evaluation.exceeds(self.problem)
            ):
                no_good_cuts += 1
            else:
                break
        return state.lower_bound

    def tighten_bound(self) -> None:
        """Tighten the lower bound with a smaller solver gap, if that can close the rest."""
        state = self.state
        if state.lower_bound is None or self.is_within_gap():
            return
        if state.is_within_gap(self.problem, _SOLVER_GAP_RATIO * self.gap):
            solution = self.solve_bound(self.gap / _SOLVER_GAP_RATIO**2)
            # A solve without plans has an infinite bound, even if it was stopped early.
            if solution.plans is not None:
                state.lower_bound = max(solution.bound, state.lower_bound)

    def add_memory_cuts(self) -> bool:
        """Add moments at which the memory bound of the current plans exceeds a limit.

        Returns whether any were added.
        """
        new = False
        for name, bound in self.state.memory_bounds.items():
            memory = self.evaluator.memory(name)
            assert memory is not None, "it is limited"
            states, limit = self.evaluator.states(name), self.state.bound_limits.memory[name]
            new |= bound.add_above(states.names, limit, memory.written)
        return new

    def add_no_good_cuts(self, excess: Mapping[str, float]) -> bool:
        """Exclude the current plans of classes that exceed memory; return whether any are new."""
        before, plans = self.state.bound_limits.without, self.evaluator.plans
        new = {
            name: [*before.get(name, ()), plans[name]]
            for name in self.state.memory_bounds
            if f"memory {name}" in excess and plans[name] not in before.get(name, ())
        }
        self.state.bound_limits = replace(self.state.bound_limits, without={**before, **new})
        return bool(new)

    def solve_bound(self, gap: float) -> Solution:
        """Return the solution of the bound: `NeighbourTerms` if times depend on neighbours."""
        costs: dict[str, OperatorCosts] = {
            name: NeighbourTerms(self.problem.classes[name]) if learned.differ else learned
            for name, learned in self.state.state_costs.items()
        }
        state = self.state
        return self._solve_program(
            self.evaluator.plans, costs, state.memory_bounds, state.bound_limits, gap
        )

    # Programs

    def _solve_program(
        self,
        start: Plans,
        costs: Mapping[str, OperatorCosts],
        memory: Mapping[str, LowerBoundTerm],
        limits: Constraints,
        gap: float | None = None,
    ) -> Solution:
        """Solve one program for all classes, or one per class if they are independent.

        Args:
            start: plans for a warm start.
            costs: times of operator states, by class.
            memory: memory terms, by class.
            limits: limits of the program.
            gap: allowed relative gap; default: the gap of the search.
        """
        problem = self.problem

        def solved(limits: Constraints, least: str, names: Sequence[str], start: Plans) -> Solution:
            return find(
                problem,
                self.evaluator,
                costs,
                memory,
                limits,
                least,
                names,
                start,
                self.gap if gap is None else gap,
                self.seconds,
            )

        names = list(problem.open)
        # All classes share the codecs.
        groups = [names] if self.evaluator.options.open else [[name] for name in names]
        if problem.least == "seconds":
            # First minimize seconds, then the variance at these seconds.
            fastest = solved(limits, "seconds", names, start)
            if fastest.plans is None:
                return fastest
            limits = replace(limits, seconds=fastest.value * (1 + TOLERANCE), variance=None)
            calmest = together(
                [solved(limits, "variance", group, fastest.plans) for group in groups], 0.0
            )
            better = fastest if calmest.plans is None else calmest
            stopped = fastest.stopped or calmest.stopped
            return replace(fastest, plans=better.plans, codecs=better.codecs, stopped=stopped)
        if problem.variance is not None:
            groups = [names]
        fixed = sum(
            problem.weight(name) * part.variance(part.fixed_plan)
            for name, part in problem.classes.items()
            if part.fixed_plan is not None
        )
        return together([solved(limits, "variance", group, start) for group in groups], fixed)
