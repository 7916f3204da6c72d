"""Programs that are solved and judged in turns.

A program knows one time for each state, and what each operator in it holds. What the judge says of its plan is learned, and the program
solved again, until there is nothing to learn: then the plan is as near to the best as the gap says. Where times do not depend on neighbours
and memory is not limited, there is nothing to learn from the start.

Invariant: the best plan keeps all limits by the judge. The bound is that of the program that was solved last, of whose prices and memory
the last plan is exact: where the program only takes after the judge, other plans may be below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from qsync_fx.allocator.answer import Note, NoteKind, Round
from qsync_fx.allocator.coding import Codecs
from qsync_fx.allocator.exact.certain import Certain, Holds
from qsync_fx.allocator.exact.memory import Held
from qsync_fx.allocator.exact.prices import Least, Priced, Prices
from qsync_fx.allocator.exact.solving import Found, Limits, find, together
from qsync_fx.allocator.judge import TOLERANCE, Judge, Judged, beyond
from qsync_fx.allocator.problem import Plans, Problem
from qsync_fx.allocator.remembered import Remembered
from qsync_fx.allocator.uniforms import uniforms

NEAR: Final = 2e-3
"""How far off, of it, memory may be reckoned before that is worth another round."""
_MOMENTS: Final = 8
"""How often at most what is certain is reckoned at more moments, as plans are found that hold too much at them."""
_BEYOND: Final = 0.05
"""By how much, of a limit, memory is let go beyond it once."""


class Search:
    """
    Attributes:
        problem: what is asked.
        judge: of the plans that were looked at last.
        prices, held: what states of each open class take and hold.
        limits: that the next program is held to.
        best: the best plans that keep all limits, None where none were found.
        bound: of the last program.
        proved: what no plan is below; None where that is not known.
        smallest: by class, the least that a step was seen to hold at most.
        rounds: what was solved.
        notes: what else to know.
    """

    def __init__(self, problem: Problem, gap: float, seconds: float) -> None:
        # What a step holds takes long to know, and matters where it is limited.
        self.problem = replace(
            problem,
            classes={
                name: replace(part, times=Remembered(part.times), training=part.training if part.memory else None)
                for name, part in problem.classes.items()
            },
        )
        self.gap, self.seconds = gap, seconds
        self.judge = Judge(self.problem, problem.uniform())
        self.prices = {name: Prices(self.problem.classes[name]) for name in problem.open}
        self.best: tuple[Plans, Judged] | None = None
        self.smallest: dict[str, int] = {}
        self.bound = 0.0
        self.proved: float | None = None
        self._certain: dict[str, Certain] = {}
        self.rounds: list[Round] = []
        self.notes: list[Note] = []
        memory = {name: part.memory for name in problem.open if (part := problem.classes[name]).memory is not None}
        self.held = {name: Held() for name in memory}
        self.limits = self._asked = Limits(problem.seconds, memory, problem.variance)
        if memory:
            self._uniforms()
        else:
            self.look(problem.uniform())
        self.learn()

    def run(self, rounds: int) -> None:
        """Solves and judges until there is nothing to learn, so many times at most."""
        self._settle(rounds)
        if self.best is None and not self.limits.memory:
            self._uniforms()
            self.learn()
            self._settle(rounds)
        if self.limits.memory and self.best is not None and not self.near:
            # Plans that are reckoned to hold a little too much may not: they are looked at before they are ruled out.
            within = self.limits
            self.limits = replace(within, memory={name: most * (1 + _BEYOND) for name, most in within.memory.items()})
            self._solve()
            self.limits = within
            self._settle(rounds)

    def _settle(self, rounds: int) -> None:
        seen: list[tuple[Plans, Codecs]] = []
        for _ in range(rounds):
            if self.near or (solved := self._solve()) is None:
                return
            found, excess, new = solved
            if found in seen or (not excess and not new):
                if not excess:
                    return
                self._tighten(excess)
            seen.append(found)

    def _solve(self) -> tuple[tuple[Plans, Codecs], dict[str, float], bool] | None:
        """Solves once; returns the plans and codecs, what of the limits they exceed, and whether anything was learned."""
        found = self._found(self.best[0] if self.best else self.judge.plans)
        if found.infeasible and self.best is not None:
            # What was learned of other plans may hide one that is known to keep the limits.
            self.look(self.best[0], self.best[1].codecs)
            self.learn()
            found = self._found(self.best[0])
        if found.stopped:
            self.notes.append(Note(NoteKind.STOPPED, numbers={"seconds": self.seconds}))
        if found.plans is None:
            return None
        plans = self.problem.completed(found.plans)
        judged = self.look(plans, found.codecs)
        excess, new = judged.exceeds(self.problem), self.learn()
        self.bound = found.bound
        self.rounds.append(Round(judged, found.bound, not excess, new))
        return (plans, judged.codecs), excess, new

    def bounded(self) -> float | None:
        """Returns what no plan is below, where any is known: reckoned with what is certain to be held, and the least times."""
        prices: dict[str, Priced] = {
            name: Least(self.problem.classes[name]) if known.differ else known for name, known in self.prices.items()
        }
        new = self.proved is None
        for name, held in self.held.items():
            part, memory = self.problem.classes[name], self.judge.memory(name)
            if name not in self._certain and memory is not None:
                self._certain[name] = Certain(part, memory.expected)
            new |= self._certain[name].add(held.places(part.graph))
        if not (self._above() or new):
            return self.proved
        for _ in range(_MOMENTS):
            found = self._found(self.judge.plans, prices, self._certain, self._asked)
            if found.plans is None:
                break
            self.proved = max(found.bound, self.proved or 0.0)
            self.look(self.problem.completed(found.plans), found.codecs)
            self.learn()
            if self.near or not self._above():
                break
        return self.proved

    def _above(self) -> bool:
        """Adds moments at which the judge's plans certainly hold more than they may; returns whether there are any."""
        found = [
            certain.add_above(self.judge.states(name).names, self._asked.memory[name])
            for name, certain in self._certain.items()
        ]
        return any(found)

    def lean(self, rounds: int) -> bool:
        """Solves with what is certain to be held, and holds back what the judge says of the last plan beyond that; so many times at most.

        What is beyond follows plans little, so that this leads to good ones in few rounds. Returns whether one of them keeps all limits.
        """
        seen: list[tuple[Plans, Codecs]] = []
        solved: list[dict[str, float]] = []
        fits = False
        for _ in range(rounds if self._certain and not self.near else 0):
            memory = {name: limit - self._beyond(name) for name, limit in self._asked.memory.items()}
            if memory in solved:
                break
            solved.append(memory)
            found = self._found(self.judge.plans, self.prices, self._certain, replace(self._asked, memory=memory))
            if found.stopped:
                self.notes.append(Note(NoteKind.STOPPED, numbers={"seconds": self.seconds}))
            if found.plans is None:
                break
            plans = self.problem.completed(found.plans)
            judged = self.look(plans, found.codecs)
            excess, new = judged.exceeds(self.problem), self.learn()
            self.bound, fits = found.bound, fits or not excess
            self.rounds.append(Round(judged, found.bound, not excess, new))
            if (plans, judged.codecs) in seen or self.near:
                break
            seen.append((plans, judged.codecs))
        return fits

    def _beyond(self, name: str) -> float:
        """Returns what the judge says that the last plan holds beyond what is certain."""
        return (self.judge.peak(name) or 0) - self._certain[name].of(self.judge.states(name).names)

    @property
    def excluded(self) -> bool:
        """Whether what is certain to be held under the judge's plans is beyond a limit, which is quicker to know than what is held."""
        known = ((limit, self._certain.get(name), name) for name, limit in self._asked.memory.items())
        return any(
            beyond(certain.of(self.judge.states(name).names), limit)
            for limit, certain, name in known
            if certain is not None
        )

    @property
    def near(self) -> bool:
        """Whether the best plan is proved to be as near to the best as was asked for."""
        if self.best is None or self.proved is None:
            return False
        value = self.best[1].value(self.problem)
        return value - self.proved <= self.gap * value

    @property
    def approximate(self) -> bool:
        """Whether the program only takes after the judge: where memory is limited, or times depend on neighbours."""
        limited = any(self.problem.classes[name].memory is not None for name in self.problem.open)
        return limited or any(prices.differ for prices in self.prices.values())

    def look(self, plans: Plans, codecs: Codecs | None = None) -> Judged:
        """Has plans judged, and keeps them if none better are known; with the codecs of buckets as they are where none are given."""
        judged = self.judge.become(plans, codecs)
        for name, figures in judged.classes.items():
            if figures.peak_bytes is not None:
                self.smallest[name] = min(figures.peak_bytes, self.smallest.get(name, figures.peak_bytes))
        if not judged.exceeds(self.problem) and (self.best is None or self._better(judged, self.best[1])):
            self.best = self.judge.plans, judged
        return judged

    def learn(self) -> bool:
        """Takes prices and memory from the plans that were judged last; returns whether anything is new."""
        new = False
        for name in self.problem.open:
            states, differed = self.judge.states(name), self.prices[name].differ
            new |= self.prices[name].learn(states.names)
            if self.prices[name].differ and not differed:
                # Proved of times that were taken to follow no neighbours.
                self.proved = None
            if self.problem.classes[name].memory is not None:
                memory = self.judge.memory(name)
                assert memory is not None
                off = self.held[name].learn(states, self._passes(name), memory.tasks)
                new |= off > NEAR
        return new

    def _better(self, one: Judged, other: Judged) -> bool:
        """Whether what is least is less, or something else where that is the same."""
        first, second = one.value(self.problem), other.value(self.problem)
        if abs(first - second) > TOLERANCE * max(first, second):
            return first < second
        return (one.variance, one.seconds) < (other.variance, other.seconds)

    def _uniforms(self) -> None:
        """Looks at uniform plans, and learns from them; at last at the best that keeps all limits, else the narrowest."""
        for plans in uniforms(self.problem).values():
            self.look(plans)
            self.learn()
        self.look(self.best[0] if self.best is not None else self.problem.uniform())

    def _found(
        self,
        start: Plans,
        prices: Mapping[str, Priced] | None = None,
        held: Mapping[str, Holds] | None = None,
        limits: Limits | None = None,
    ) -> Found:
        """Solves the program of all classes, or one a class where nothing couples them."""
        problem, limits = self.problem, limits or self.limits

        def solved(limits: Limits, least: str, names: Sequence[str], start: Plans) -> Found:
            known = prices or self.prices, held or self.held
            return find(problem, self.judge, *known, limits, least, names, start, self.gap, self.seconds)

        names = list(problem.open)
        # Codecs are the same on all classes.
        apart = [names] if self.judge.options.open else [[name] for name in names]
        if problem.least == "seconds":
            # The least seconds, and then the least variance that these allow.
            fastest = solved(limits, "seconds", names, start)
            if fastest.plans is None:
                return fastest
            limits = replace(limits, seconds=fastest.value * (1 + TOLERANCE), variance=None)
            calmest = together([solved(limits, "variance", some, fastest.plans) for some in apart], 0.0)
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

    def _passes(self, name: str) -> float:
        """Returns what the judge says that both passes hold at most: what the optimizer takes follows no plan."""
        memory = self.judge.memory(name)
        assert memory is not None
        passes = max(moment.bytes for moment in memory.worst.moments if moment.place != "optimizer")
        return passes + memory.peak_bytes - memory.worst.peak.bytes

    def _tighten(self, excess: dict[str, float]) -> None:
        """Holds programs to less, by what their plans exceeded limits by though nothing of them was unknown."""
        limits = self.limits
        if limits.seconds is not None and "seconds" in excess:
            limits = replace(limits, seconds=limits.seconds - excess["seconds"])
        memory = {name: most - excess.get(f"memory {name}", 0.0) for name, most in limits.memory.items()}
        self.limits = replace(limits, memory=memory)
