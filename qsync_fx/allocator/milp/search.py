"""Programs that are solved and judged in turns.

A program knows one time for each state, and what each operator in it holds. What the judge says of its plan is learned, and the program
solved again, until there is nothing to learn: then the plan is as near to the best as the gap says. Where times do not depend on neighbours
and memory is not limited, there is nothing to learn from the start.

Invariant: the best plan keeps all limits by the judge. The bound is that of the program that was solved last, of whose prices and memory
the last plan is exact: where the program only takes after the judge, other plans may be below it.

What is known of plans that were looked at: the best, what their states took, and what they held.

Invariant: the best plan keeps all limits by the judge; prices and memory are exact of the plan that was learned last.
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
"""How far off, of it, memory may be reckoned before that is worth another round."""


class SearchState:
    """
    Attributes:
        problem: what is asked.
        judge: of the plans that were looked at last.
        prices, held: what states of each open class take and hold.
        best: the best plans that keep all limits, None where none were found.
        smallest: by class, the least that a step was seen to hold at most.
        proved: what no plan is below; None where that is not known.
    """

    def __init__(self, problem: Problem) -> None:
        # What a step holds takes long to know, and matters where it is limited.
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
        """Whether the program only takes after the judge: where memory is limited, or times depend on neighbours."""
        limited = any(self.problem.classes[name].memory is not None for name in self.problem.open)
        return limited or any(prices.differ for prices in self.prices.values())

    def look(self, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
        """Has plans judged, and keeps them if none better are known; with the codecs of buckets as they are where none are given."""
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
        """Takes prices and memory from the plans that were judged last; returns whether anything is new."""
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
        """Looks at uniform plans, and learns from them; at last at the best that keeps all limits, else the narrowest."""
        for plans in uniforms(self.problem).values():
            self.look(plans)
            self.learn()
        self.look(self.best[0] if self.best is not None else self.problem.uniform())

    def _better(self, item: Evaluation, other: Evaluation) -> bool:
        """Whether what is least is less, or something else where that is the same."""
        first, second = item.value(self.problem), other.value(self.problem)
        if abs(first - second) > TOLERANCE * max(first, second):
            return first < second
        return (item.variance, item.seconds) < (other.variance, other.seconds)

    def _passes(self, name: str) -> float:
        """Returns what the judge says that both passes hold at most: what the optimizer takes follows no plan."""
        memory = self.judge.memory(name)
        assert memory is not None
        passes = max(moment.bytes for moment in memory.worst.moments if moment.place != "optimizer")
        return passes + memory.peak_bytes - memory.worst.peak.bytes


_MOMENTS: Final = 8
"""How often at most what is certain is reckoned at more moments, as plans are found that hold too much at them."""
_EXCLUDED: Final = 24
"""How many plans at most are ruled out one by one, which hold too much though that is not certain of all that are like them."""
_CLOSE: Final = 0.02
"""The gap from which down plans are: of a wider one too many are between the best and the bound."""
_OWN: Final = 3
"""Up to how many times the gap that may be left a program's own may be what lacks."""
_BEYOND: Final = 0.05
"""By how much, of a limit, memory is let go beyond it once."""


class MilpSearch(SearchState):
    """
    Args:
        problem: what is asked.
        gap: that may be left between the best plan and what is proved.
        seconds: after which a program is given up.

    Attributes:
        limits: that the next program is held to.
        bound: of the last program.
        rounds: what was solved.
        notes: what else to know.
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
        """Solves and judges until there is nothing to learn, so many times at most."""
        self._settle(rounds)
        if self.best is None and not self.limits.memory:
            self.begin()
            self.learn()
            self._settle(rounds)
        if self.limits.memory and self.best is not None and not self.near:
            # Plans that are reckoned to hold a little too much may not: they are looked at before they are ruled out.
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
        """Solves once; returns the plans and codecs, what of the limits they exceed, and whether anything was learned."""
        result = self._found(self.best[0] if self.best else self.judge.plans)
        if result.infeasible and self.best is not None:
            # What was learned of other plans may hide one that is known to keep the limits.
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
        """Returns what no plan is below, where any is known: reckoned with what is certain to be held, and what operators take beside
        their neighbours."""
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
        """Proves more where that may be all that lacks: a program that is solved to a gap leaves as much between its plan and its bound."""
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
        """What operators take at least, beside any neighbours."""
        result = self.prices.items()
        return {
            name: NeighbourTerms(self.problem.classes[name]) if entry.differ else entry
            for name, entry in result
        }

    def _above(self) -> bool:
        """Adds moments at which the judge's plans certainly hold more than they may; returns whether there are any."""
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
        """Rules out the judge's plans of classes that hold too much under them; returns whether there are any."""
        before, plans = self._asked.without, self.judge.plans
        new = {
            name: [*before.get(name, ()), plans[name]]
            for name in self._certain
            if f"memory {name}" in excess and plans[name] not in before.get(name, ())
        }
        self._asked = replace(self._asked, without={**before, **new})
        return bool(new)

    def lean(self, rounds: int) -> bool:
        """Solves with what is certain to be held, and holds back what the judge says of the last plan beyond that; so many times at most.

        What is beyond follows plans little, so that this leads to good ones in few rounds. Where a plan that holds too much and one that
        does not lead to one another, what is between them is halved. Returns whether one of them keeps all limits.
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
        """Whether limits of memory are so near one another that halving what is between them finds little."""
        return all(
            abs(item[name] - other[name]) <= NEAR / 4 * limit
            for name, limit in self._asked.memory.items()
        )

    def _beyond(self, name: str) -> float:
        """Returns what the judge says that the last plan holds beyond what is certain."""
        return (self.judge.peak(name) or 0) - self._certain[name].of(self.judge.states(name).names)

    @property
    def excluded(self) -> bool:
        """Whether what is certain to be held under the judge's plans is beyond a limit, which is quicker to know than what is held."""
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
        """Whether the best plan is proved to be as near to the best as was asked for."""
        return self._within(self.gap)

    def _within(self, gap: float) -> bool:
        """Whether the best plan is proved to be so near to the best."""
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
        """Solves the program of all classes, or one a class where nothing couples them."""
        problem, limits = self.problem, limits or self.limits

        def solved(limits: Constraints, least: str, names: Sequence[str], start: Plans) -> Solution:
            available = prices or self.prices, live or self.held
            return find(
                problem, self.judge, *available, limits, least, names, start, self.gap, self.seconds
            )

        names = list(problem.open)
        # Codecs are the same on all classes.
        apart = [names] if self.judge.options.open else [[name] for name in names]
        if problem.least == "seconds":
            # The least seconds, and then the least variance that these allow.
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
        """Holds programs to less, by what their plans exceeded limits by though nothing of them was unknown."""
        limits = self.limits
        if limits.seconds is not None and "seconds" in excess:
            limits = replace(limits, seconds=limits.seconds - excess["seconds"])
        memory = {
            name: most - excess.get(f"memory {name}", 0.0) for name, most in limits.memory.items()
        }
        self.limits = replace(limits, memory=memory)
