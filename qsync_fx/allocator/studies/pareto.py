"""What more time would buy: the least variance at each of several times of a step, `pareto`.

Invariant: no point of a front is both slower and of more variance than another, nor as good in one and worse in the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from qsync_fx.allocator.answer import Allocator, Answer
from qsync_fx.allocator.baselines import Uniform
from qsync_fx.allocator.problem import Problem
from qsync_fx.allocator.uniforms import uniforms
from qsync_fx.errors import PlanError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Front:
    """
    Attributes:
        points: from the fastest to that of least variance.
        uniform: plans of one format, by the format, for comparison; they may exceed memory.
        chosen: the plan that was asked for, where one was; it need not be on the front.
    """

    points: tuple[Answer, ...]
    uniform: Mapping[str, Answer]
    chosen: Answer | None = None


def check_points(points: int) -> None:
    """Raise `PlanError` if a front cannot have this number of points."""
    if points < 2:
        raise PlanError(f"a front of {points} points is none", where="points", do="ask for 2 at least")


def pareto(
    problem: Problem, allocator: Allocator, points: int = 9, chosen: Answer | None = None, say: Say = lambda name: None
) -> Front:
    """Returns the front of plans between the fastest one and one of least variance, within the problem's memory.

    Args:
        problem: what is asked; what it limits of seconds and variance does not matter here.
        allocator: what finds the plans.
        points: how many times of a step are tried, both ends included.
        chosen: a plan to be shown beside it.
        say: called with each point that is done.

    Raises:
        PlanError: no plan fits into memory.
    """
    check_points(points)
    free = replace(problem, seconds=None, variance=None)
    fastest = allocator.allocate(replace(free, least="seconds", variance=float("inf")))
    say("the fastest")
    calmest = allocator.allocate(replace(free, least="variance"))
    say("that of least variance")
    found = [fastest, calmest]
    first, last = fastest.judged.seconds, calmest.judged.seconds
    for at in range(1, points - 1):
        seconds = first + (last - first) * at / (points - 1)
        # Between the two ends there are plans; that an allocator misses one takes nothing from the others.
        with contextlib.suppress(PlanError):
            found.append(allocator.allocate(replace(free, least="variance", seconds=seconds)))
        say(f"{at} of {points - 2}")
    uniform = {fmt: Uniform(fmt).allocate(free) for fmt in uniforms(free)}
    return Front(tuple(_undominated(found)), uniform, chosen)


def _undominated(found: list[Answer]) -> list[Answer]:
    ordered = sorted(found, key=lambda answer: (answer.judged.seconds, answer.judged.variance))
    kept: list[Answer] = []
    for answer in ordered:
        if not kept or answer.judged.variance < kept[-1].judged.variance:
            kept.append(answer)
    return kept
