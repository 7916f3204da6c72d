"""The exact allocator: `Exact`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.answer import Answer, Note, NoteKind
from qsync_fx.allocator.exact.infeasible import why_not
from qsync_fx.allocator.exact.search import Search
from qsync_fx.allocator.problem import Problem

GAP: Final = 1e-4
ROUNDS: Final = 6
SECONDS: Final = 60.0
_ROUNDING: Final = 1e-6


@dataclass(frozen=True)
class Exact:
    """
    Attributes:
        gap: that may be left between the plan and the bound, of what is least.
        rounds: how often the judge is learned from, at most.
        seconds: after which a program is given up, with the best plan found so far.
    """

    gap: float = GAP
    rounds: int = ROUNDS
    seconds: float = SECONDS

    @property
    def name(self) -> str:
        return "exact"

    def allocate(self, problem: Problem) -> Answer:
        """Returns the plan that is best; see `Allocator`."""
        began = time.perf_counter()
        search = Search(problem, self.gap, self.seconds)
        search.run(self.rounds)
        certain = search.every() or not search.approximate
        if not certain:
            search.widen()
        if search.best is None:
            raise why_not(search)
        plans, judged = search.best
        bound = _bound(search.bound, judged.value(problem), certain)
        took = time.perf_counter() - began
        notes = () if certain else (Note(NoteKind.RECKONED),)
        return Answer(problem, plans, judged, self.name, bound, took, tuple(search.rounds), (*search.notes, *notes))


def _bound(bound: float, value: float, certain: bool) -> float | None:
    """Returns the bound; none where a plan that the judge knows better is below it, beyond rounding."""
    return None if not certain and value < bound * (1 - _ROUNDING) else min(bound, value)
