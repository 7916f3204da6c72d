"""MILP search: solve a program, evaluate its plans, refine the model of costs, repeat.

Programs are built from two models of costs. The bound contains lower bounds on times
(`NeighbourTerms`) and on memory (`SavedTensorsBound`). The estimate contains one time per operator
state and linearized memory, both learned from evaluated plans (`refine_model`); it is exact if
times do not depend on neighbours and memory is not limited, and then it is the bound, too.

    bound --> bound with corrected memory limits --> estimate, to a fixed point --> widening

Each step runs only if a gap is left, the second one only with a memory limit.
Every plan of a program is evaluated by `PlanEvaluator`; the incumbent is the best plan that meets
all limits. `SearchState.lower_bound` is a bound over all plans, `SearchState.program_bound` the
bound of the last program: if the estimate is approximate, other plans can be below it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from qsync_fx.allocator.codec_choice import Codecs
from qsync_fx.allocator.evaluator import TOLERANCE, CachedTimes, Evaluation, PlanEvaluator
from qsync_fx.allocator.milp.build_and_solve import Constraints, Solution, find, together
from qsync_fx.allocator.milp.device_program import MemoryTerms
from qsync_fx.allocator.milp.format_variables import NeighbourTerms, OperatorCosts, StateCosts
from qsync_fx.allocator.milp.linearized_memory import LinearizedMemory
from qsync_fx.allocator.milp.saved_tensors_bound import SavedTensorsBound
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, SolverIteration
from qsync_fx.allocator.problem import Plans, Problem, uniforms
from qsync_fx.allocator.recovery import recover, units

_MEMORY_TOLERANCE: Final = 2e-3
"""Relative error of the memory estimate above which another iteration is worthwhile."""


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
        state_costs: learned time of each operator state, by open class.
        memory_estimates: learned live bytes, by open class with a memory limit.
        memory_bounds: lower bounds on live bytes, by open class with a memory limit.
        incumbent: best plans that meet all limits; None if none were found.
        lower_bound: proved lower bound of the objective over all plans, infinite if none meets the
            limits; None if unknown.
        program_bound: bound of the last program in `iterations`.
        smallest_peak_bytes: smallest evaluated peak memory, by class.
        iterations: solved programs with the evaluations of their plans.
        notes: remarks for the result.
    """

    limits: Constraints
    state_costs: Mapping[str, StateCosts]
    memory_estimates: Mapping[str, LinearizedMemory]
    memory_bounds: Mapping[str, SavedTensorsBound] = field(default_factory=dict)
    incumbent: Incumbent | None = None
    lower_bound: float | None = None
    program_bound: float = 0.0
    smallest_peak_bytes: dict[str, int] = field(default_factory=dict)
    iterations: list[SolverIteration] = field(default_factory=list)
    notes: list[PlanNote] = field(default_factory=list)

    @property
    def is_approximate(self) -> bool:
        """Whether the estimate is approximate: limited memory, or times depend on neighbours."""
        differ = any(costs.differ for costs in self.state_costs.values())
        return differ or bool(self.memory_estimates)


class MilpSearch:
    """Search for the best plans of all open classes, with a proved lower bound.

    `gap` is relative, between incumbent and lower bound; `seconds` limits each program.
    """

    def __init__(self, problem: Problem, gap: float, seconds: float) -> None:
        classes = {
            name: replace(part, times=CachedTimes.of(part.times))
            for name, part in problem.classes.items()
        }
        for name, part in classes.items():
            # Peak memory is expensive to evaluate and needed only if it is limited.
            if part.memory is None:
                classes[name] = replace(part, training=None)
        self.problem = problem = replace(problem, classes=classes)
        self.gap, self.seconds = gap, seconds
        self.evaluator = PlanEvaluator(problem, problem.uniform())
        memory = {name: classes[name].memory for name in problem.open}
        limits = {name: limit for name, limit in memory.items() if limit is not None}
        self.state = SearchState(
            Constraints(problem.seconds, limits, problem.variance),
            {name: StateCosts(classes[name]) for name in problem.open},
            {name: LinearizedMemory() for name in limits},
        )
        if limits:
            self.evaluate_uniform_plans()
        else:
            self.evaluate(problem.uniform())
        self.refine_model()

    def is_within_gap(self) -> bool:
        """Return whether the incumbent is proved to be within the gap of the optimum."""
        incumbent, bound = self.state.incumbent, self.state.lower_bound
        if incumbent is None or bound is None:
            return False
        value = incumbent.evaluation.value(self.problem)
        return value - bound <= self.gap * value

    def solve(self, max_iterations: int) -> None:
        """Search as described above, with at most `max_iterations` in each loop."""
        if self.state.is_approximate:
            self.compute_lower_bound()
        if self.is_within_gap() or self.state.lower_bound == math.inf:
            return
        if self.state.memory_bounds:
            self.correct_memory_limits(max_iterations)
        self.iterate_to_fixed_point(max_iterations)
        if self.state.incumbent is None:
            self.evaluate_uniform_plans()
            self.iterate_to_fixed_point(max_iterations)
        if self.state.is_approximate and not self.is_within_gap():
            self.widen_operators()

    # Evaluation of plans

    def evaluate(self, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
        """Evaluate plans, and make them the incumbent if they are the best so far."""
        evaluation = self.evaluator.set_plans(plans, codecs)
        smallest, incumbent = self.state.smallest_peak_bytes, self.state.incumbent
        for name, metrics in evaluation.classes.items():
            if metrics.peak_bytes is not None:
                smallest[name] = min(metrics.peak_bytes, smallest.get(name, metrics.peak_bytes))
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

    def evaluate_best(
        self, limits: Constraints, least: str, names: Sequence[str] = ()
    ) -> Evaluation:
        """Evaluate the plans of some classes, of all by default, that minimize the estimate."""
        state, names = self.state, names or self.problem.open
        costs, memory = state.state_costs, state.memory_estimates
        result = self._find(costs, memory, limits, least, names, self.evaluator.plans)
        plans = self.evaluator.plans | dict(result.plans or {})
        return self.evaluate(plans, result.codecs)

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
                # The memory of the optimizer step does not depend on the plan.
                moments = (m.bytes for m in memory.worst.moments if m.place != "optimizer")
                peak = max(moments) + memory.peak_bytes - memory.worst.peak.bytes
                error = self.state.memory_estimates[name].learn(states, peak, memory.tasks)
                new |= error > _MEMORY_TOLERANCE
        return new

    def widen_operators(self) -> None:
        """Widen single operators of the incumbent as in precision recovery, in limited time."""
        problem, incumbent = self.problem, self.state.incumbent
        if incumbent is None or problem.least != "variance":
            return
        self.evaluator.set_plans(incumbent.plans, incumbent.evaluation.codecs)
        groups = {name: units(problem.classes[name], problem.tied) for name in problem.open}
        end = time.monotonic() + self.seconds
        recover(self.evaluator, groups, problem.omega, lambda: time.monotonic() > end)
        self.evaluate(self.evaluator.plans)

    def _is_better(self, evaluation: Evaluation, other: Evaluation) -> bool:
        """Return whether the objective is less, or the other metrics at an equal objective."""
        first, second = evaluation.value(self.problem), other.value(self.problem)
        if abs(first - second) > TOLERANCE * max(first, second):
            return first < second
        return (evaluation.variance, evaluation.seconds) < (other.variance, other.seconds)

    # Solution of the two models

    def compute_lower_bound(self) -> None:
        """Solve the bound, evaluate its plan, and keep its bound."""
        costs: dict[str, OperatorCosts] = {}
        for name, learned in self.state.state_costs.items():
            costs[name] = NeighbourTerms(self.problem.classes[name]) if learned.differ else learned
        memory = {}
        for name in self.state.memory_estimates:
            evaluated = self.evaluator.memory(name)
            assert evaluated is not None
            memory[name] = SavedTensorsBound(self.problem.classes[name], evaluated.expected)
        self.state.memory_bounds = memory
        limits = self.state.limits
        solution = self._solve_program(self.evaluator.plans, costs, memory, limits)
        if solution.infeasible:
            self.state.lower_bound = math.inf
        if solution.plans is not None:
            self.state.lower_bound = solution.bound
            self.evaluate(self.problem.completed(solution.plans), solution.codecs)
            self.refine_model()

    def correct_memory_limits(self, max_iterations: int) -> None:
        """Solve with memory bounds, and limits reduced by the last excess over these bounds.

        The excess depends little on the plan. If a feasible and an infeasible limit alternate, the
        limit is bisected.
        """
        state, solved = self.state, list[Mapping[str, float]]()
        feasible: Mapping[str, float] = {}
        infeasible: Mapping[str, float] = {}
        for _ in range(max_iterations):
            memory = {}
            for name, bound in state.memory_bounds.items():
                live = bound.of(self.evaluator.states(name).names)
                above = (self.evaluator.peak(name) or 0) - live
                memory[name] = state.limits.memory[name] - above
            if min(memory.values()) <= 0:
                return
            if memory in solved:
                if not feasible or not infeasible:
                    return
                memory = {name: (feasible[name] + infeasible[name]) / 2 for name in memory}
            solved.append(memory)
            limits = replace(state.limits, memory=memory)
            start, costs = self.evaluator.plans, state.state_costs
            solution = self._solve_program(start, costs, state.memory_bounds, limits)
            if (evaluation := self._evaluate_solution(solution)) is None or self.is_within_gap():
                return
            if evaluation.exceeds(self.problem):
                infeasible = memory
            else:
                feasible = memory

    def iterate_to_fixed_point(self, max_iterations: int) -> None:
        """Solve, evaluate and refine the estimate, until no new costs are revealed.

        Plans that exceed a limit although all of their costs were known tighten the limits.
        """
        visited: list[tuple[Plans, Codecs]] = []
        for _ in range(max_iterations):
            evaluation = self._evaluate_solution(self._solve_estimate())
            if evaluation is None or self.is_within_gap():
                return
            excess, new = evaluation.exceeds(self.problem), self.state.iterations[-1].learned
            result = self.evaluator.plans, evaluation.codecs
            if result in visited or not (excess or new):
                if not excess:
                    return
                self.tighten_limits(excess)
            visited.append(result)

    def tighten_limits(self, excess: Mapping[str, float]) -> None:
        """Tighten the limits by the excess of a plan whose costs were all known."""
        limits = self.state.limits
        if limits.seconds is not None:
            limits = replace(limits, seconds=limits.seconds - excess.get("seconds", 0.0))
        memory = {
            name: limit - excess.get(f"memory {name}", 0.0) for name, limit in limits.memory.items()
        }
        self.state.limits = replace(limits, memory=memory)

    def _evaluate_solution(self, solution: Solution) -> Evaluation | None:
        """Evaluate the plans of a solution, refine the estimate, and record the iteration."""
        if solution.plans is None:
            return None
        evaluation = self.evaluate(self.problem.completed(solution.plans), solution.codecs)
        fits, new = not evaluation.exceeds(self.problem), self.refine_model()
        self.state.program_bound = solution.bound
        iteration = SolverIteration(evaluation, solution.bound, fits=fits, learned=new)
        self.state.iterations.append(iteration)
        return evaluation

    def _solve_estimate(self) -> Solution:
        """Return the solution of the estimate; if it is infeasible, refined at the incumbent."""
        state, incumbent = self.state, self.state.incumbent
        costs, memory = state.state_costs, state.memory_estimates
        start = self.evaluator.plans if incumbent is None else incumbent.plans
        solution = self._solve_program(start, costs, memory, state.limits)
        if solution.infeasible and incumbent is not None:
            # Costs learned from other plans can hide a plan that meets the limits.
            self.evaluate(incumbent.plans, incumbent.evaluation.codecs)
            self.refine_model()
            solution = self._solve_program(incumbent.plans, costs, memory, state.limits)
        return solution

    def _solve_program(
        self,
        start: Plans,
        costs: Mapping[str, OperatorCosts],
        memory: Mapping[str, MemoryTerms],
        limits: Constraints,
    ) -> Solution:
        """Solve one program for all classes, or one per class if they are independent."""
        problem, names = self.problem, list(self.problem.open)
        groups = [[name] for name in names]
        # All classes share the codecs and the limit of the variance.
        if self.evaluator.options.open or problem.variance is not None:
            groups = [names]

        def least_variance(limits: Constraints, start: Plans) -> list[Solution]:
            return [self._find(costs, memory, limits, "variance", group, start) for group in groups]

        if problem.least == "seconds":
            # First minimize seconds, then the variance at these seconds.
            fastest = self._find(costs, memory, limits, "seconds", names, start)
            if fastest.plans is None:
                return fastest
            limits = replace(limits, seconds=fastest.value * (1 + TOLERANCE), variance=None)
            calmest = together(least_variance(limits, fastest.plans), 0.0)
            if calmest.plans is None:
                calmest = replace(fastest, stopped=calmest.stopped)
            stopped = fastest.stopped or calmest.stopped
            return replace(fastest, plans=calmest.plans, codecs=calmest.codecs, stopped=stopped)
        fixed = sum(
            problem.weight(name) * part.variance(part.fixed_plan)
            for name, part in problem.classes.items()
            if part.fixed_plan is not None
        )
        return together(least_variance(limits, start), fixed)

    def _find(
        self,
        costs: Mapping[str, OperatorCosts],
        memory: Mapping[str, MemoryTerms],
        limits: Constraints,
        least: str,
        names: Sequence[str],
        start: Plans,
    ) -> Solution:
        """Solve the program of some classes; see `build_and_solve.find`."""
        solution = find(
            self.problem,
            self.evaluator,
            costs,
            memory,
            limits,
            least,
            names,
            start,
            self.gap,
            self.seconds,
        )
        note = PlanNote(PlanNoteKind.STOPPED, numbers={"seconds": self.seconds})
        if solution.stopped and note not in self.state.notes:
            self.state.notes.append(note)
        return solution
