"""The allocator of the paper: `Greedy`.

The paper leaves open what is done where the fastest plan is no good start: no plan of blocks fits, or recovery gets stuck before it reaches
what a uniform plan has. So each uniform plan that keeps the limits is a start, too, where it is better than what was found.

Invariant: the answer keeps all limits, and is no worse than any uniform plan that does. Where there is such a uniform plan, there is an
answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qsync_fx.allocator.answer import Answer
from qsync_fx.allocator.judging.judge import Judge, Judged
from qsync_fx.allocator.paper.initial import initial
from qsync_fx.allocator.paper.recovery import Indicator, recover
from qsync_fx.allocator.paper.units import Unit, spread, units
from qsync_fx.allocator.problem import Plans, Problem
from qsync_fx.allocator.unfit import unfit
from qsync_fx.allocator.uniforms import uniforms


@dataclass(frozen=True)
class Greedy:
    """
    Attributes:
        indicator: what orders operators; what the problem's sensitivities say where None.
        called: its name.
    """

    indicator: Indicator | None = None
    called: str = "paper"

    @property
    def name(self) -> str:
        return self.called

    def allocate(self, problem: Problem) -> Answer:
        """Returns the plan that it chooses; see `Allocator`."""
        began = time.perf_counter()
        search = _Search(problem, self.indicator or (lambda name, op, fmt: problem.classes[name].omega(op, fmt)))
        plans, judged = search.best()
        took = time.perf_counter() - began
        return Answer(problem, plans, judged, self.name, took=took)


class _Search:
    def __init__(self, problem: Problem, indicator: Indicator) -> None:
        self.problem, self.indicator = problem, indicator
        self.units: Mapping[str, Sequence[Unit]] = {
            name: units(problem.classes[name], problem.tied) for name in problem.open
        }
        # While seconds are to be few, recovery is what brings the variance below its limit.
        self.judge = Judge(replace(problem, variance=None), self._narrowest())

    def best(self) -> tuple[Plans, Judged]:
        """Returns the best of what the starts lead to; raises `PlanError` where none leads to a plan that fits."""
        found = [self._recovered(self._fastest())]
        for start in self._uniform():
            judged = self.judge.become(start)
            known = min((_order(self.problem, each) for _, each in found))
            if _order(self.problem, judged) < known:
                found += [(start, judged), self._recovered(start)]
        plans, judged = min(found, key=lambda pair: _order(self.problem, pair[1]))
        if judged.exceeds(self.problem):
            raise unfit(self.problem, [each for _, each in found])
        return plans, judged

    def _recovered(self, start: Plans) -> tuple[Plans, Judged]:
        judge, problem = self.judge, self.problem
        judge.become(start)
        if judge.fits():

            def enough() -> bool:
                return problem.least == "seconds" and (problem.variance is None or judge.variance <= problem.variance)

            if not enough():
                recover(judge, self.units, self.indicator, enough)
        return judge.plans, judge.judged()

    def _fastest(self) -> Plans:
        problem = self.problem
        found = {name: initial(problem.classes[name], own, self.judge, name) for name, own in self.units.items()}
        return problem.completed(found)

    def _narrowest(self) -> Plans:
        chosen = {name: spread({unit: unit.formats[0] for unit in own}) for name, own in self.units.items()}
        return self.problem.completed(chosen)

    def _uniform(self) -> list[Plans]:
        """Returns the uniform plans that units can have."""

        def fits(plans: Plans) -> bool:
            formats = (
                (unit, {plans[name][op] for op in unit.operators}) for name in self.units for unit in self.units[name]
            )
            return all(len(asked) == 1 and asked <= set(unit.formats) for unit, asked in formats)

        return [plans for plans in uniforms(self.problem).values() if fits(plans)]


def _order(problem: Problem, judged: Judged) -> tuple[float, float, float]:
    """Returns what plans are sorted by: whether they keep the limits, what is to be least, and then the other."""
    other = judged.seconds if problem.least == "variance" else judged.variance
    return (bool(judged.exceeds(problem)), judged.value(problem), other)
