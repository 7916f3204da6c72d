"""What is known of plans that were looked at: the best, what their states took, and what they held.

Invariant: the best plan keeps all limits by the judge; prices and memory are exact of the plan that was learned last.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from qsync_fx.allocator.coding import Codecs
from qsync_fx.allocator.exact.terms.memory import Held
from qsync_fx.allocator.exact.terms.prices import Prices
from qsync_fx.allocator.judging.judge import TOLERANCE, Judge, Judged
from qsync_fx.allocator.judging.remembered import Remembered
from qsync_fx.allocator.problem import Plans, Problem
from qsync_fx.allocator.uniforms import uniforms

NEAR: Final = 2e-3
"""How far off, of it, memory may be reckoned before that is worth another round."""


class Learned:
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
                name: replace(part, times=Remembered(part.times), training=part.training if part.memory else None)
                for name, part in problem.classes.items()
            },
        )
        self.judge = Judge(self.problem, problem.uniform())
        self.prices = {name: Prices(self.problem.classes[name]) for name in problem.open}
        self.held = {name: Held() for name in problem.open if problem.classes[name].memory is not None}
        self.best: tuple[Plans, Judged] | None = None
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

    def _better(self, one: Judged, other: Judged) -> bool:
        """Whether what is least is less, or something else where that is the same."""
        first, second = one.value(self.problem), other.value(self.problem)
        if abs(first - second) > TOLERANCE * max(first, second):
            return first < second
        return (one.variance, one.seconds) < (other.variance, other.seconds)

    def _passes(self, name: str) -> float:
        """Returns what the judge says that both passes hold at most: what the optimizer takes follows no plan."""
        memory = self.judge.memory(name)
        assert memory is not None
        passes = max(moment.bytes for moment in memory.worst.moments if moment.place != "optimizer")
        return passes + memory.peak_bytes - memory.worst.peak.bytes
