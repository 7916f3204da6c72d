"""Time margins against prediction errors, and the error for infeasible problems.

If a device is predicted to finish just in time for the others, each step lasts as long as the
slowest of them in that step. A margin plans devices as slower than their profiles by the
uncertainty of the prediction. The uncertainty of the devices that set the pace counts, too: if they
run faster than predicted, the others delay them.

Invariant: metrics of a plan refer to devices without slowdown, and a margin never makes a feasible
problem infeasible. Numbers in the error come from evaluated plans.
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
"""Maximum default margin; a larger spread of steps comes from other load, not from the device."""


def check_margin(margin: float | None) -> None:
    """Raise `OptionError` if the margin is not a share from 0 to below 1."""
    if margin is not None and not 0 <= margin < 1:
        raise OptionError(
            f"no plan leaves a margin of {margin:g}",
            where="margin",
            do="give a share from 0, 0.03 for 3%",
        )


def margins(
    problem: Problem, available: Mapping[str, DeviceInputs], requested: float | None
) -> dict[str, float]:
    """Return the relative slowdown to plan with for each open class, without zero margins.

    The result is empty if the step has no time limit, or if a single class has no requested margin.

    Args:
        problem: the planning problem.
        available: profile of each class.
        requested: margin from the user. None: the measured uncertainty of each class, combined with
            the largest uncertainty among the classes with a fixed plan.
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
    """Return the relative error of predicted steps; 0 if no plan has two measured steps."""
    runs = profile.runs if isinstance(profile, Profile) else []
    spreads = [run.spread for run in runs if len(run.steps) > 1]
    return min(MOST, max(AGREES, statistics.median(spreads))) if spreads else 0.0


def _either(owned: float, pace: float) -> float:
    """Return the margin for two independent errors: of the class and of the pace."""
    return min(MOST, math.hypot(owned, pace))


def slowed(problem: Problem, shares: Mapping[str, float]) -> Problem:
    """Return the problem with devices slowed down by relative shares."""
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
    """Return the allocator's plan for slowed devices, evaluated on the real devices.

    Falls back to the plan without margin if no plan meets the limits with it.

    Args:
        problem: the planning problem.
        shares: relative slowdown of each class.
        target: function from a problem to its limit of seconds per step.
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
        result = evaluate_plan(problem, answer.plans, answer.evaluation.codecs)
        if not result.exceeds(problem):
            return replace(
                answer, problem=problem, evaluation=result, notes=(*notes, *answer.notes)
            )
    return chosen.allocate(problem)


def unfit(problem: Problem, tried: Sequence[Evaluation]) -> PlanError:
    """Return the error on the limits that the nearest plan exceeds, with a remedy."""
    nearest = min(tried, key=lambda evaluation: excess(problem, evaluation))
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


def excess(problem: Problem, evaluation: Evaluation) -> float:
    """Return the relative excess over the limits, summed over all limits."""
    return sum(
        by / limit(problem, subject) if limit(problem, subject) else float("inf")
        for subject, by in evaluation.exceeds(problem).items()
    )


def limit(problem: Problem, description: str) -> float:
    """Return a limit by its key in `Evaluation.exceeds`."""
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
    """Format seconds for error messages."""
    return f"{seconds * 1e3:.4g} ms"


def megabytes(size: float) -> str:
    """Format bytes for error messages."""
    return f"{size / 1e6:.4g} MB"
