"""The error of an allocator that tries plans, where none that it tried keeps the limits.

Invariant: every number is one that the judge said of a plan that was tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_fx.allocator.judging.judge import Judged
from qsync_fx.allocator.problem import Problem
from qsync_fx.errors import PlanError


def unfit(problem: Problem, tried: Sequence[Judged]) -> PlanError:
    """Returns what says which limits the nearest plan breaks, by how much, and what would do."""
    nearest = min(tried, key=lambda judged: excess(problem, judged))
    over = nearest.exceeds(problem)
    parts = [
        f"{_value(what, limit(problem, what) + by)} {_of(what)}, {_value(what, by)} more" for what, by in over.items()
    ]
    allow = [f"{_value(what, limit(problem, what) + by)} {_of(what)}" for what, by in over.items()]
    return PlanError(
        f"no plan was found within the limits; the nearest has {' and '.join(parts)} than allowed",
        where=", ".join(_of(what) for what in over),
        do=f"allow {' and '.join(allow)}, or let the exact allocator look for a plan",
    )


def excess(problem: Problem, judged: Judged) -> float:
    """Returns by how much of a limit plans exceed it, summed over all limits."""
    return sum(
        by / limit(problem, what) if limit(problem, what) else float("inf")
        for what, by in judged.exceeds(problem).items()
    )


def limit(problem: Problem, what: str) -> float:
    """Returns a limit by the name that `Judged.exceeds` gives it."""
    if what in ("seconds", "variance"):
        found = problem.seconds if what == "seconds" else problem.variance
    else:
        found = problem.classes[what.removeprefix("memory ")].memory
    assert found is not None
    return found


def _of(what: str) -> str:
    return {"seconds": "a step", "variance": "of variance"}.get(what, f"on {what.removeprefix('memory ')}")


def _value(what: str, number: float) -> str:
    if what == "variance":
        return f"{number:.4g}"
    return milliseconds(number) if what == "seconds" else megabytes(number)


def milliseconds(seconds: float) -> str:
    """Returns seconds as errors say them."""
    return f"{seconds * 1e3:.4g} ms"


def megabytes(size: float) -> str:
    """Returns bytes as errors say them."""
    return f"{size / 1e6:.4g} MB"
