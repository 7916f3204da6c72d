"""The exact allocator: `Exact`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.answer import Answer, Note, NoteKind
from qsync_fx.allocator.exact.collecting import uncollected
from qsync_fx.allocator.exact.infeasible import why_not
from qsync_fx.allocator.exact.search import Search
from qsync_fx.allocator.exact.trying import begin_elsewhere, every, few, widen
from qsync_fx.allocator.judging.judge import with_peaks
from qsync_fx.allocator.problem import Problem

GAP: Final = 1e-4
ROUNDS: Final = 6
SECONDS: Final = 60.0


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
        with uncollected():
            return self._allocated(problem)

    def _allocated(self, problem: Problem) -> Answer:
        began = time.perf_counter()
        search = Search(problem, self.gap, self.seconds)
        if search.approximate:
            search.bounded()
        # Where little is chosen, looking twice takes little.
        if not search.near and (not search.lean(self.rounds) or few(search)):
            search.run(self.rounds)
        if search.approximate:
            search.sharpen()
        whole = not search.approximate or (not search.near and every(search))
        if not whole and not search.near:
            begin_elsewhere(search)
            widen(search)
            search.bounded()
        if search.best is None:
            raise why_not(search)
        bound = search.bound if whole else search.proved
        plans = search.best[0]
        judged = with_peaks(problem, *search.best)
        value = judged.value(problem)
        took = time.perf_counter() - began
        notes = () if whole or search.near else (Note(NoteKind.RECKONED, numbers={problem.least: search.bound}),)
        known = None if bound is None else min(bound, value)
        return Answer(problem, plans, judged, self.name, known, took, tuple(search.rounds), (*search.notes, *notes))
