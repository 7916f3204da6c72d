"""The margin that a plan leaves below the seconds that it may take: what is foreseen is not what will be, and steps differ.

A device that would be done just when another is makes both wait for each other: each step takes as long as the one that happens to be
slower. So devices that plans are chosen for are planned on as though they took longer than their profiles say, by as much as what is
foreseen and what is measured may differ and still be held to agree. That is uncertain of those, too, that set the pace: one that is quicker
than its profile says waits as long as if the others were slower.

Invariant: what is said of a plan is said of devices as they are; a margin takes a plan away from no problem that has one.

The error of an allocator that tries plans, where none that it tried keeps the limits.

Invariant: every number is one that the judge said of a plan that was tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from qsync_fx.allocator.evaluator import Evaluation, evaluate_plan
from qsync_fx.allocator.plan_result import AGREES, Allocator, PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Problem
from qsync_fx.errors import OptionError, PlanError
from qsync_fx.profiler.profile import Profile
from qsync_fx.timeline.device_profiles import DeviceInputs

MOST: Final = 0.1
"""Beyond this share, what steps differ by is by others on the machine, and says nothing of the device."""


def check_margin(margin: float | None) -> None:
    """Raise `OptionError` if this is not a share from 0 to below 1."""
    if margin is not None and not 0 <= margin < 1:
        raise OptionError(
            f"no plan leaves a margin of {margin:g}",
            where="margin",
            do="give a share from 0, 0.03 for 3%",
        )


def margins(
    problem: Problem, available: Mapping[str, DeviceInputs], requested: float | None
) -> dict[str, float]:
    """Returns the share by which each class that is open to choice is to be planned on as slower; none where nobody would wait.

    Args:
        problem: what is asked.
        known: of each class.
        asked: by the user; None for what is uncertain of each class, and of those that set the pace, as it was measured.
    """
    check_margin(requested)
    if problem.seconds is None or (requested is None and len(problem.classes) == 1):
        return {}
    pace = max(
        (uncertain(available[name]) for name in problem.classes if name not in problem.open),
        default=0.0,
    )
    result = {
        name: _either(uncertain(available[name]), pace) if requested is None else requested
        for name in problem.open
    }
    return {name: share for name, share in result.items() if share > 0}


def uncertain(profile: DeviceInputs) -> float:
    """Returns the share by which a step may be longer than is foreseen; 0 where no two steps of one plan were measured."""
    runs = profile.runs if isinstance(profile, Profile) else []
    spreads = [run.spread for run in runs if len(run.steps) > 1]
    return min(MOST, max(AGREES, statistics.median(spreads))) if spreads else 0.0


def _either(owned: float, pace: float) -> float:
    """Returns by what share a step and the pace may differ from what is foreseen of the two, each by itself."""
    return min(MOST, math.hypot(owned, pace))


def slowed(problem: Problem, shares: Mapping[str, float]) -> Problem:
    """Returns the problem with devices that take longer."""
    devices = {
        name: replace(device, slowdown=device.slowdown * (1 + shares.get(name, 0.0)))
        for name, device in problem.cluster.devices.items()
    }
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def with_margin(
    problem: Problem,
    shares: Mapping[str, float],
    target: Callable[[Problem], float | None],
    chosen: Allocator,
) -> PlanResult:
    """Returns what an allocator chooses that leaves a margin, as it is on devices as they are.

    Args:
        problem: what is asked.
        shares: by which each class is planned on as slower.
        target: the seconds that a step may take in a problem.
        chosen: the allocator.
    """
    if shares:
        careful = slowed(problem, shares)
        try:
            answer = chosen.allocate(replace(careful, seconds=target(careful)))
        except PlanError:
            return chosen.allocate(problem)
        notes = tuple(
            PlanNote(PlanNoteKind.LEAVES, name, numbers={"share": share})
            for name, share in shares.items()
        )
        result = evaluate_plan(problem, answer.plans, answer.judged.codecs)
        if not result.exceeds(problem):
            return replace(answer, problem=problem, judged=result, notes=(*notes, *answer.notes))
    return chosen.allocate(problem)


def unfit(problem: Problem, tried: Sequence[Evaluation]) -> PlanError:
    """Returns what says which limits the nearest plan breaks, by how much, and what would do."""
    nearest = min(tried, key=lambda judged: excess(problem, judged))
    over = nearest.exceeds(problem)
    parts = [
        f"{_value(subject, limit(problem, subject) + by)} {_of(subject)}, {_value(subject, by)} more"
        for subject, by in over.items()
    ]
    allow = [
        f"{_value(subject, limit(problem, subject) + by)} {_of(subject)}"
        for subject, by in over.items()
    ]
    return PlanError(
        f"no plan was found within the limits; the nearest has {' and '.join(parts)} than allowed",
        where=", ".join(_of(subject) for subject in over),
        do=f"allow {' and '.join(allow)}, or let the exact allocator look for a plan",
    )


def excess(problem: Problem, judged: Evaluation) -> float:
    """Returns by how much of a limit plans exceed it, summed over all limits."""
    return sum(
        by / limit(problem, subject) if limit(problem, subject) else float("inf")
        for subject, by in judged.exceeds(problem).items()
    )


def limit(problem: Problem, description: str) -> float:
    """Returns a limit by the name that `Evaluation.exceeds` gives it."""
    if description in ("seconds", "variance"):
        result = problem.seconds if description == "seconds" else problem.variance
    else:
        result = problem.classes[description.removeprefix("memory ")].memory
    assert result is not None
    return result


def _of(description: str) -> str:
    return {"seconds": "a step", "variance": "of variance"}.get(
        description, f"on {description.removeprefix('memory ')}"
    )


def _value(description: str, number: float) -> str:
    if description == "variance":
        return f"{number:.4g}"
    return milliseconds(number) if description == "seconds" else megabytes(number)


def milliseconds(seconds: float) -> str:
    """Returns seconds as errors say them."""
    return f"{seconds * 1e3:.4g} ms"


def megabytes(size: float) -> str:
    """Returns bytes as errors say them."""
    return f"{size / 1e6:.4g} MB"
