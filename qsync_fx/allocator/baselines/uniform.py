"""One format for all operators: `Uniform` and `FullPrecision`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from qsync_fx.allocator.answer import Answer, Note, NoteKind
from qsync_fx.allocator.judging.judge import Judge, Judged
from qsync_fx.allocator.problem import Plans, Problem
from qsync_fx.allocator.unfit import excess
from qsync_fx.allocator.uniforms import uniforms
from qsync_fx.errors import PlanError, nearest


@dataclass(frozen=True)
class Uniform:
    """
    Attributes:
        fmt: the format; the best one of those that keep the limits where None.
    """

    fmt: str | None = None

    @property
    def name(self) -> str:
        return "uniform" if self.fmt is None else f"uniform-{self.fmt}"

    def allocate(self, problem: Problem) -> Answer:
        """Returns the plan, which may exceed limits; raises `PlanError` where the format is not one of all classes'."""
        began = time.perf_counter()
        known = uniforms(problem)
        if self.fmt is not None and self.fmt not in known:
            raise PlanError(f"not all devices take plans with {self.fmt!r}", do=nearest(self.fmt, known))
        tried = known.values() if self.fmt is None else [known[self.fmt]]
        plans, judged = best(problem, tried)
        took = time.perf_counter() - began
        return Answer(problem, plans, judged, self.name, took=took, notes=exceeded(problem, judged))


@dataclass(frozen=True)
class FullPrecision:
    """The widest format of each class."""

    @property
    def name(self) -> str:
        return "full-precision"

    def allocate(self, problem: Problem) -> Answer:
        """Returns the plan, which may exceed limits."""
        began = time.perf_counter()
        plans, judged = best(problem, [full(problem)])
        took = time.perf_counter() - began
        return Answer(problem, plans, judged, self.name, took=took, notes=exceeded(problem, judged))


def full(problem: Problem) -> Plans:
    """Returns plans of the widest format of each open class."""
    parts = {name: problem.classes[name] for name in problem.open}
    return problem.completed({name: part.uniform(part.widest) for name, part in parts.items()})


def best(problem: Problem, tried: Iterable[Plans]) -> tuple[Plans, Judged]:
    """Returns the best of plans that keep the limits; where none does, the nearest to that."""
    judge = Judge(problem, problem.uniform())
    found = [(plans, judge.become(plans)) for plans in tried]
    return min(found, key=lambda pair: (excess(problem, pair[1]), pair[1].value(problem), pair[1].seconds))


def exceeded(problem: Problem, judged: Judged) -> tuple[Note, ...]:
    """Returns the note of plans that exceed limits."""
    over = judged.exceeds(problem)
    return (Note(NoteKind.UNFIT, numbers=over),) if over else ()
