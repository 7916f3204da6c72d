"""MILP search: solve a program, evaluate its plan, learn from the evaluation, repeat.

A program contains one time per state and a memory estimate per operator state. `PlanEvaluator`
evaluates the resulting plan, and the next program uses its times and memory, until the evaluation
reveals no new costs. Programs are exact from the start if times do not depend on neighbours and
memory is not limited.

Invariant: the best plan meets all limits by `PlanEvaluator`. `MilpSearch.bound` is the bound of the
last program only: if the program is approximate, other plans can be below it. `SearchState.proved`
is a bound over all plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from qsync_fx.allocator.codec_choice import Codecs
from qsync_fx.allocator.evaluator import TOLERANCE, CachedTimes, Evaluation, PlanEvaluator, beyond
from qsync_fx.allocator.milp.build_and_solve import Constraints, Solution, find, together
from qsync_fx.allocator.milp.format_variables import Priced, StateCosts
from qsync_fx.allocator.milp.linearized_memory import LinearizedMemory
from qsync_fx.allocator.milp.memory_bound.lower_bound import LowerBoundTerm, MemoryLowerBound
from qsync_fx.allocator.milp.neighbour_terms import NeighbourTerms
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, SolverIteration
from qsync_fx.allocator.problem import Plans, Problem, uniforms

NEAR: Final = 2e-3
"""Relative error of the memory estimate above which another round is worthwhile."""


class SearchState:
    """Results of evaluated plans: the best plan, state costs and memory.

    State costs and memory are exact for the plan that was learned last.

    Attributes:
        problem: the planning problem, with cached times.
        judge: evaluator with the plans evaluated last.
        prices: time of each state, by open class.
        held: memory estimate of each state, by open class with a memory limit.
        best: the best plans that meet all limits; None if none were found.
        smallest: smallest evaluated peak memory in bytes, by class.
        proved: lower bound of the objective over all plans; None if unknown.
    """

    def __init__(self, problem: Problem) -> None:
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
        self.judge = PlanEvaluator(self.problem, problem.uniform())
        self.prices = {name: StateCosts(self.problem.classes[name]) for name in problem.open}
        self.held = {
            name: LinearizedMemory()
            for name in problem.open
            if problem.classes[name].memory is not None
        }
        self.best: tuple[Plans, Evaluation] | None = None
        self.smallest: dict[str, int] = {}
        self.proved: float | None = None
        if self.held:
            self.begin()
        else:
            self.look(problem.uniform())
        self.learn()

    @property
    def approximate(self) -> bool:
        """Whether programs are approximate: limited memory, or times that depend on neighbours."""
        limited = any(self.problem.classes[name].memory is not None for name in self.problem.open)
        return limited or any(prices.differ for prices in self.prices.values())

    def look(self, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
        """Evaluate plans, record them if they are the best so far, and return the evaluation.

        If `codecs` is None, the codecs of the buckets do not change.
        """
        judged = self.judge.become(plans, codecs)
        for name, figures in judged.classes.items():
            if figures.peak_bytes is not None:
                self.smallest[name] = min(
                    figures.peak_bytes, self.smallest.get(name, figures.peak_bytes)
                )
        if not judged.exceeds(self.problem) and (
            self.best is None or self._better(judged, self.best[1])
        ):
            self.best = self.judge.plans, judged
        return judged

    def learn(self) -> bool:
        """Learn state costs and memory from the current plans; return whether any are new."""
        new = False
        for name in self.problem.open:
            states = self.judge.states(name)
            new |= self.prices[name].learn(states.names)
            if self.problem.classes[name].memory is not None:
                memory = self.judge.memory(name)
                assert memory is not None
                off = self.held[name].learn(states, self._passes(name), memory.tasks)
                new |= off > NEAR
        return new

    def begin(self) -> None:
        """Learn from all uniform plans; end at the best feasible plan, else the narrowest."""
        for plans in uniforms(self.problem).values():
            self.look(plans)
            self.learn()
        self.look(self.best[0] if self.best is not None else self.problem.uniform())

    def _better(self, item: Evaluation, other: Evaluation) -> bool:
        """Return whether the objective is less, or the other metrics at an equal objective."""
        first, second = item.value(self.problem), other.value(self.problem)
        if abs(first - second) > TOLERANCE * max(first, second):
            return first < second
        return (item.variance, item.seconds) < (other.variance, other.seconds)

    def _passes(self, name: str) -> float:
        """Return the peak of both passes in bytes; optimizer memory does not depend on the plan."""
        memory = self.judge.memory(name)
        assert memory is not None
        passes = max(moment.bytes for moment in memory.worst.moments if moment.place != "optimizer")
        return passes + memory.peak_bytes - memory.worst.peak.bytes


_MOMENTS: Final = 8
"""Maximum rounds that add moments to the memory bound after a plan exceeds it at them."""
_EXCLUDED: Final = 24
"""Maximum rounds that exclude single plans with a high peak but an admissible memory bound."""
_CLOSE: Final = 0.02
"""Gap up to which single plans are excluded; above it too many plans are left."""
_OWN: Final = 3
"""Ratio of gaps up to which the solver's own gap may be all that is missing."""
_BEYOND: Final = 0.05
"""Relative relaxation of the memory limits in one additional solve."""


class MilpSearch(SearchState):
    """Alternating solver: programs of all open classes, evaluation of their plans.

    Args:
        problem: the planning problem.
        gap: allowed relative gap between the best plan and the proved bound.
        seconds: time limit of each program.

    Attributes:
        limits: constraints of the next program.
        bound: bound of the last program.
        rounds: solved iterations.
        notes: remarks for the result.
    """

    def __init__(self, problem: Problem, gap: float, seconds: float) -> None:
        super().__init__(problem)
        self.gap, self.seconds = gap, seconds
        self.bound = 0.0
        self._certain: dict[str, MemoryLowerBound] = {}
        self.rounds: list[SolverIteration] = []
        self.notes: list[PlanNote] = []
        memory = {
            name: limit for name in self.held if (limit := problem.classes[name].memory) is not None
        }
        self.limits = self._asked = Constraints(problem.seconds, memory, problem.variance)

    def run(self, rounds: int) -> None:
        """Solve and evaluate at most `rounds` times, until no new costs are learned."""
        self._settle(rounds)
        if self.best is None and not self.limits.memory:
            self.begin()
            self.learn()
            self._settle(rounds)
        if self.limits.memory and self.best is not None and not self.near:
            # The memory estimate can be too high: evaluate plans slightly above the limit before
            # they are excluded.
            within = self.limits
            self.limits = replace(
                within, memory={name: most * (1 + _BEYOND) for name, most in within.memory.items()}
            )
            self._solve()
            self.limits = within
            self._settle(rounds)

    def _settle(self, rounds: int) -> None:
        visited: list[tuple[Plans, Codecs]] = []
        for _ in range(rounds):
            if self.near or (solved := self._solve()) is None:
                return
            result, excess, new = solved
            if result in visited or (not excess and not new):
                if not excess:
                    return
                self._tighten(excess)
            visited.append(result)

    def _solve(self) -> tuple[tuple[Plans, Codecs], dict[str, float], bool] | None:
        """Solve once; return plans and codecs, excess over limits, and whether costs are new."""
        result = self._found(self.best[0] if self.best else self.judge.plans)
        if result.infeasible and self.best is not None:
            # Costs learned from other plans can hide a plan that meets the limits.
            self.look(self.best[0], self.best[1].codecs)
            self.learn()
            result = self._found(self.best[0])
        if result.stopped:
            self.notes.append(PlanNote(PlanNoteKind.STOPPED, numbers={"seconds": self.seconds}))
        if result.plans is None:
            return None
        plans = self.problem.completed(result.plans)
        judged = self.look(plans, result.codecs)
        excess, new = judged.exceeds(self.problem), self.learn()
        self.bound = result.bound
        self.rounds.append(SolverIteration(judged, result.bound, not excess, new))
        return (plans, judged.codecs), excess, new

    def bounded(self) -> float | None:
        """Return the best proved lower bound of the objective over all plans; None if unknown.

        Its programs use lower bounds on memory and operator times with neighbours.
        """
        prices = self._least_prices
        new = self.proved is None
        for name, live in self.held.items():
            part, memory = self.problem.classes[name], self.judge.memory(name)
            if name not in self._certain and memory is not None:
                self._certain[name] = MemoryLowerBound(part, memory.expected)
            new |= self._certain[name].add(live.places(part.graph))
        if not (self._above() or new or self._within(_CLOSE)):
            return self.proved
        moments, plans = _MOMENTS, _EXCLUDED
        while moments and plans:
            result = self._found(self.judge.plans, prices, self._certain, self._asked)
            if result.plans is None:
                break
            self.proved = max(result.bound, self.proved or 0.0)
            judged = self.look(self.problem.completed(result.plans), result.codecs)
            self.learn()
            if self.near:
                break
            if self._above():
                moments -= 1
            elif self._within(_CLOSE) and self._exclude(judged.exceeds(self.problem)):
                plans -= 1
            else:
                break
        return self.proved

    def sharpen(self) -> None:
        """Tighten the bound with a smaller solver gap, if that can close the remaining gap."""
        if self.best is None or self.proved is None or self.near:
            return
        value = self.best[1].value(self.problem)
        if value - self.proved > _OWN * self.gap * value:
            return
        prices, gap = self._least_prices, self.gap
        self.gap = gap / _OWN**2
        result = self._found(self.judge.plans, prices, self._certain, self._asked)
        self.gap, self.proved = gap, max(result.bound, self.proved)

    @property
    def _least_prices(self) -> dict[str, Priced]:
        """Operator times for bounds: `NeighbourTerms` if times depend on neighbours."""
        result = self.prices.items()
        return {
            name: NeighbourTerms(self.problem.classes[name]) if entry.differ else entry
            for name, entry in result
        }

    def _above(self) -> bool:
        """Add moments at which the memory bound of the current plans exceeds a limit.

        Returns whether any were added.
        """
        result = []
        for name, certain in self._certain.items():
            memory = self.judge.memory(name)
            assert memory is not None, "it is limited"
            result.append(
                certain.add_above(
                    self.judge.states(name).names, self._asked.memory[name], memory.written
                )
            )
        return any(result)

    def _exclude(self, excess: Mapping[str, float]) -> bool:
        """Exclude the current plans of classes that exceed memory; return whether any are new."""
        before, plans = self._asked.without, self.judge.plans
        new = {
            name: [*before.get(name, ()), plans[name]]
            for name in self._certain
            if f"memory {name}" in excess and plans[name] not in before.get(name, ())
        }
        self._asked = replace(self._asked, without={**before, **new})
        return bool(new)

    def lean(self, rounds: int) -> bool:
        """Solve with memory bounds plus the last excess over them, at most `rounds` times.

        The excess of the peak over the lower bound depends little on the plan, so that few rounds
        lead to good plans. If a feasible and an infeasible limit alternate, the limit is bisected.
        Returns whether any plan met all limits.
        """
        visited: list[tuple[Plans, Codecs]] = []
        solved: list[dict[str, float]] = []
        inside: dict[str, float] | None = None
        outside: dict[str, float] | None = None
        for _ in range(rounds if self._certain and not self.near else 0):
            memory = {
                name: limit - self._beyond(name) for name, limit in self._asked.memory.items()
            }
            if memory in solved or (visited and visited[-1] in visited[:-1]):
                if inside is None or outside is None or self._alike(inside, outside):
                    break
                memory = {name: (inside[name] + outside[name]) / 2 for name in memory}
            solved.append(memory)
            result = self._found(
                self.judge.plans, self.prices, self._certain, replace(self._asked, memory=memory)
            )
            if result.stopped:
                self.notes.append(PlanNote(PlanNoteKind.STOPPED, numbers={"seconds": self.seconds}))
            if result.plans is None:
                break
            plans = self.problem.completed(result.plans)
            judged = self.look(plans, result.codecs)
            excess, new = judged.exceeds(self.problem), self.learn()
            inside, outside = (inside, memory) if excess else (memory, outside)
            self.bound = result.bound
            self.rounds.append(SolverIteration(judged, result.bound, not excess, new))
            if self.near:
                break
            visited.append((plans, judged.codecs))
        return inside is not None

    def _alike(self, item: Mapping[str, float], other: Mapping[str, float]) -> bool:
        """Return whether memory limits are so close that further bisection is pointless."""
        return all(
            abs(item[name] - other[name]) <= NEAR / 4 * limit
            for name, limit in self._asked.memory.items()
        )

    def _beyond(self, name: str) -> float:
        """Return the difference between peak memory and its lower bound for the last plan."""
        return (self.judge.peak(name) or 0) - self._certain[name].of(self.judge.states(name).names)

    @property
    def excluded(self) -> bool:
        """Whether the memory bound of the current plans exceeds a limit."""
        available = (
            (limit, self._certain.get(name), name) for name, limit in self._asked.memory.items()
        )
        return any(
            beyond(certain.of(self.judge.states(name).names, waiting=False), limit)
            for limit, certain, name in available
            if certain is not None
        )

    @property
    def near(self) -> bool:
        """Whether the best plan is proved to be within the requested gap."""
        return self._within(self.gap)

    def _within(self, gap: float) -> bool:
        """Return whether the best plan is proved to be within a relative gap."""
        if self.best is None or self.proved is None:
            return False
        value = self.best[1].value(self.problem)
        return value - self.proved <= gap * value

    def _found(
        self,
        start: Plans,
        prices: Mapping[str, Priced] | None = None,
        live: Mapping[str, LowerBoundTerm] | None = None,
        limits: Constraints | None = None,
    ) -> Solution:
        """Solve one program for all classes, or one per class if they are independent."""
        problem, limits = self.problem, limits or self.limits

        def solved(limits: Constraints, least: str, names: Sequence[str], start: Plans) -> Solution:
            available = prices or self.prices, live or self.held
            return find(
                problem, self.judge, *available, limits, least, names, start, self.gap, self.seconds
            )

        names = list(problem.open)
        # All classes share the codecs.
        apart = [names] if self.judge.options.open else [[name] for name in names]
        if problem.least == "seconds":
            # First minimize seconds, then the variance at these seconds.
            fastest = solved(limits, "seconds", names, start)
            if fastest.plans is None:
                return fastest
            limits = replace(limits, seconds=fastest.value * (1 + TOLERANCE), variance=None)
            calmest = together(
                [solved(limits, "variance", some, fastest.plans) for some in apart], 0.0
            )
            better = fastest if calmest.plans is None else calmest
            stopped = fastest.stopped or calmest.stopped
            return replace(fastest, plans=better.plans, codecs=better.codecs, stopped=stopped)
        apart = apart if problem.variance is None else [names]
        fixed = sum(
            problem.weight(name) * part.variance(part.kept)
            for name, part in problem.classes.items()
            if part.kept is not None
        )
        return together([solved(limits, "variance", names, start) for names in apart], fixed)

    def _tighten(self, excess: dict[str, float]) -> None:
        """Tighten the limits by the excess of a plan whose costs were all known."""
        limits = self.limits
        if limits.seconds is not None and "seconds" in excess:
            limits = replace(limits, seconds=limits.seconds - excess["seconds"])
        memory = {
            name: most - excess.get(f"memory {name}", 0.0) for name, most in limits.memory.items()
        }
        self.limits = replace(limits, memory=memory)
