"""Diagnosis of infeasible problems: violated limits, their excess, and a remedy.

Invariant: values that are named as possible come from evaluated plans.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from qsync_fx.allocator.evaluator import Evaluation, beyond
from qsync_fx.allocator.feasibility import megabytes, milliseconds
from qsync_fx.allocator.milp.build_and_solve import Constraints, find
from qsync_fx.errors import PlanError, shown

if TYPE_CHECKING:
    from qsync_fx.allocator.milp.search import MilpSearch


def why_not(search: MilpSearch) -> PlanError:
    """Return the error that explains why a search found no plan."""
    problem, free = search.problem, Constraints()
    for name in problem.open:
        limit = problem.classes[name].memory
        if limit is None:
            continue
        _evaluate_best(search, free, "memory", name)
        peak = search.state.smallest_peak_bytes[name]
        if beyond(peak, limit):
            do = f"allow {megabytes(peak)}, or give it a smaller batch"
            message = f"a step on {shown(name)} takes {megabytes(peak)} at least, {megabytes(peak - limit)} more than allowed"
            return PlanError(message, where=f"memory of {shown(name)}, {megabytes(limit)}", do=do)
    if problem.variance is not None:
        calmest = _evaluate_best(search, free, "variance")
        if beyond(calmest.variance, problem.variance):
            message = f"the variance is {calmest.variance:.4g} at least, {calmest.variance - problem.variance:.4g} more than allowed"
            return PlanError(
                message,
                where=f"variance, {problem.variance:.4g}",
                do="allow more, or wider formats",
            )
    fastest = _evaluate_best(search, free, "seconds")
    where = f"seconds of a step, {milliseconds(problem.seconds or 0.0)}"
    if problem.seconds is not None and beyond(fastest.seconds, problem.seconds):
        slowest = [
            name
            for name in _fixed_classes(search)
            if beyond(_step_seconds_alone(search, name), problem.seconds)
        ]
        who = (
            f": {shown(slowest[0])}, which no plan is chosen for, takes {milliseconds(_step_seconds_alone(search, slowest[0]))}"
            if slowest
            else ""
        )
        more = milliseconds(fastest.seconds - problem.seconds)
        message = (
            f"a step takes {milliseconds(fastest.seconds)} at least, {more} more than allowed{who}"
        )
        return PlanError(message, where=where, do=f"allow {milliseconds(fastest.seconds)} a step")
    live = replace(search.state.limits, seconds=None)
    within = _evaluate_best(search, live, "seconds")
    parts = [f"{milliseconds(within.seconds)} a step"]
    for name in problem.open:
        if problem.classes[name].memory is not None:
            parts.append(
                f"{megabytes(_peak(_evaluate_best(search, replace(free, seconds=problem.seconds), 'memory', name), name))} on {shown(name)}"
            )
    limits = [where] if problem.seconds is not None else []
    limits += [
        f"memory of {shown(name)}"
        for name in problem.open
        if problem.classes[name].memory is not None
    ]
    limits += ["variance"] if problem.variance is not None else []
    message = "no plan was found that keeps all limits at once, though one keeps each"
    return PlanError(message, where=" and ".join(limits), do=f"allow {', or '.join(parts)}")


def _evaluate_best(
    search: MilpSearch, limits: Constraints, least: str, name: str | None = None
) -> Evaluation:
    """Return the evaluation of the plans that minimize `least`; other classes do not change."""
    names = [name] if name is not None else list(search.problem.open)
    result = find(
        search.problem,
        search.evaluator,
        search.state.state_costs,
        search.state.memory_estimates,
        limits,
        least,
        names,
        search.evaluator.plans,
        search.gap,
        search.seconds,
    )
    return search.evaluate({**search.evaluator.plans, **(result.plans or {})}, result.codecs)


def _fixed_classes(search: MilpSearch) -> list[str]:
    """Return the classes with a fixed plan."""
    return [name for name, part in search.problem.classes.items() if part.fixed_plan is not None]


def _step_seconds_alone(search: MilpSearch, name: str) -> float:
    """Return the seconds of a step if all other classes were infinitely fast."""
    played, transfer = search.evaluator.timeline.played, search.evaluator.transfer
    device, rest = played.devices[name], sum(transfer)
    arrived = [0.0]
    for ready, travels in zip(device.ready.tolist(), transfer, strict=True):
        arrived.append(ready + rest)
        rest -= travels
    return max(device.computed, *arrived) + played.after(name)


def _peak(evaluation: Evaluation, name: str) -> int:
    return evaluation.classes[name].peak_bytes or 0
