"""Allocators side by side: what each makes of one problem.

Invariant: each is asked the same, and what one cannot answer is told beside what others can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qsync_fx.allocator.answer import Allocator, Answer
from qsync_fx.allocator.baselines import Uniform
from qsync_fx.allocator.known import allocators
from qsync_fx.allocator.problem import Problem
from qsync_fx.allocator.uniforms import uniforms
from qsync_fx.errors import PlanError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Compared:
    """What an allocator made of a problem.

    Attributes:
        allocator: its name.
        answer: None where it found no plan.
        error: why it did not.
        bound: that no plan is below, as far as any allocator knows; None where none does.
    """

    allocator: str
    answer: Answer | None
    error: PlanError | None
    bound: float | None

    @property
    def gap(self) -> float | None:
        """How far, of what it is, the value may be above the best; None where that is not known, or limits are exceeded."""
        if self.answer is None or self.bound is None or not self.answer.fits:
            return None
        value = self.answer.value
        return max(0.0, value - self.bound) / value if value > 0 else 0.0


def side_by_side(problem: Problem, more: Sequence[Allocator] = ()) -> list[Allocator]:
    """Returns the allocators that take any problem, with each uniform plan by itself, and more."""
    known = allocators()
    formats = [Uniform(fmt) for fmt in uniforms(problem)]
    return [*(known[name] for name in known if name != Uniform().name), *formats, *more]


def compare(problem: Problem, asked: Sequence[Allocator], say: Say = lambda name: None) -> list[Compared]:
    """Returns what the allocators asked make of a problem, in order; `say` is called with the name of each that is done."""
    found = list(_each(problem, asked, say))
    bounds = [answer.bound for _, answer, _ in found if answer is not None and answer.bound is not None]
    bound = max(bounds, default=None)
    return [Compared(name, answer, error, bound) for name, answer, error in found]


def _each(
    problem: Problem, asked: Sequence[Allocator], say: Say
) -> Iterator[tuple[str, Answer | None, PlanError | None]]:
    for allocator in asked:
        try:
            yield allocator.name, allocator.allocate(problem), None
        except PlanError as error:
            yield allocator.name, None, error
        say(allocator.name)
