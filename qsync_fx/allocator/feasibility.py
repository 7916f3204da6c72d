"""Time margins against prediction errors, and the error for infeasible problems.

If a device is predicted to finish just in time for the others, each step lasts as long as the
slowest of them in that step. A margin plans devices as slower than their profiles by the
uncertainty of the prediction; metrics of the plan refer to devices without slowdown.
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
from qsync_fx.formatting import duration
from qsync_fx.profiler.profile import Profile
from qsync_fx.timeline.device_profiles import DeviceInputs

MOST: Final = 0.1
"""Maximum default margin; a larger spread of steps comes from other load, not from the device."""


def check_margin(margin: float | None) -> None:
    """Raise `OptionError` if the margin is not a share from 0 to below 1."""
    if margin is not None and not 0 <= margin < 1:
        do = "give a share from 0 to below 1, such as 0.03 for 3%"
        raise OptionError(f"no plan leaves a margin of {margin:g}", where="margin", do=do)


def margins(
    problem: Problem, available: Mapping[str, DeviceInputs], requested: float | None
) -> dict[str, float]:
    """Return the relative slowdown to plan with for each open class, without zero margins.

    The result is empty if the step has no time limit, or if a single class has no requested margin.

    Default: the measured uncertainty of each class, combined with the largest uncertainty among the
    classes with a fixed plan.
    """
    check_margin(requested)
    if problem.seconds is None or (requested is None and len(problem.classes) == 1):
        return {}
    if requested == 0.0:
        return {}
    if requested is not None:
        return dict.fromkeys(problem.open, requested)
    fixed = [uncertain(available[name]) for name in problem.classes if name not in problem.open]
    # Errors of the class and of the class that sets the pace are independent.
    pace, result = max(fixed, default=0.0), {}
    for name in problem.open:
        result[name] = min(MOST, math.hypot(uncertain(available[name]), pace))
    return {name: share for name, share in result.items() if share > 0}


def uncertain(profile: DeviceInputs) -> float:
    """Return the relative error of predicted steps; 0 if no plan has two measured steps."""
    if not isinstance(profile, Profile):
        return 0.0
    spreads = [run.spread for run in profile.runs if len(run.steps) > 1]
    if not spreads:
        return 0.0
    return min(MOST, max(AGREES, statistics.median(spreads)))


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

    Falls back to the plan without margin if no plan meets the limits with it. `target` returns the
    limit of seconds per step of a problem.
    """
    if shares:
        careful = slowed(problem, shares)
        try:
            answer = chosen.allocate(replace(careful, seconds=target(careful)))
        except PlanError:
            return chosen.allocate(problem)
        devices = {
            name: replace(device, slowdown=problem.cluster.devices[name].slowdown)
            for name, device in answer.problem.cluster.devices.items()
        }
        cluster = replace(answer.problem.cluster, devices=devices)
        real = replace(answer.problem, cluster=cluster, seconds=problem.seconds)
        if answer.batches and problem.seconds is not None:
            # A step with other samples has another limit, of the same throughput.
            share = (real.cluster.samples or 1) / (problem.cluster.samples or 1)
            real = replace(real, seconds=problem.seconds * share)
        result = evaluate_plan(real, answer.plans, answer.evaluation.codecs)
        if not result.exceeds(real):
            notes = [
                PlanNote(PlanNoteKind.LEAVES, name, numbers={"share": share})
                for name, share in shares.items()
            ]
            notes += answer.notes
            return replace(answer, problem=real, evaluation=result, notes=tuple(notes))
    return chosen.allocate(problem)


def unfit(problem: Problem, tried: Sequence[Evaluation]) -> PlanError:
    """Return the error on the limits that the nearest plan exceeds, with a remedy."""
    nearest = min(tried, key=lambda evaluation: excess(problem, evaluation))
    over = nearest.exceeds(problem)
    allow = [
        _with_unit(subject, (problem.limit(subject) or 0.0) + by) for subject, by in over.items()
    ]
    more = [
        f"{size}, {_with_unit(subject, by)} more"
        for size, (subject, by) in zip(allow, over.items(), strict=True)
    ]
    return PlanError(
        f"no plan was found within the limits; the nearest has {' and '.join(more)} than allowed",
        where=", ".join(over),
        do=f"allow {' and '.join(allow)}, or use the allocator milp",
    )


def excess(problem: Problem, evaluation: Evaluation) -> float:
    """Return the relative excess over the limits, summed over all limits."""
    result = 0.0
    for subject, by in evaluation.exceeds(problem).items():
        limit = problem.limit(subject)
        result += by / limit if limit else math.inf
    return result


def _with_unit(subject: str, number: float) -> str:
    """Return a number with the unit of a limit, by the key in `Evaluation.exceeds`."""
    if subject == "seconds":
        return f"{duration(number)} a step"
    if subject == "variance":
        return f"a variance of {number:.4g}"
    return f"{megabytes(number)} on {subject.removeprefix('memory ')}"


def megabytes(size: float) -> str:
    """Format bytes for error messages."""
    return f"{size / 1e6:.4g} MB"
