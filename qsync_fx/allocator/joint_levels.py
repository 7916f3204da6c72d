"""Bounds and plans of single device classes by batch and time limit, and their best combination.

For a class, a batch and a limit of the seconds, the LP relaxation of the class's program bounds the
variance of a sample from below, and the program (`MilpSearch`) returns a plan and a tighter bound.
A step with fewer samples is assumed to be no slower and to need no more memory, so a bound is valid
for larger batches and shorter steps, too, and a plan for smaller batches and longer steps.

`JointLevels.assign` combines the classes: a dynamic program over the samples of a step.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from qsync_fx.allocator.baselines import SizedProblems
from qsync_fx.allocator.evaluator import (
    CachedTimes,
    PlanEvaluator,
    beyond,
    evaluate_plan,
    may_recompute,
    recomputing,
)
from qsync_fx.allocator.milp.build_and_solve import ClassBound
from qsync_fx.allocator.milp.format_variables import NeighbourTerms, StateCosts
from qsync_fx.allocator.milp.search import MilpSearch, SearchState
from qsync_fx.allocator.problem import Asked, DeviceClass, Problem

Array = NDArray[np.float64]
Estimate = Literal["lower", "relaxed", "upper"]
"""Kind of a variance: lower bound of all plans, optimum of the relaxation, variance of a plan."""

INNER_GAP: Final = 1e-3
"""Gap of the programs of single classes."""
_ROUNDS: Final = 2
_IDLE: Final = 1e-12
"""Slowdown of the devices of all classes but one, so that they never determine a step."""


@dataclass(frozen=True)
class Level:
    """Solution for a class, a batch, a limit of the seconds, and an activation memory budget.

    Variances are per sample: the variance of a device's gradient, times its batch. `plan` is None
    if no plan was found, and `bound` is infinite if there is none. A relaxed level has no plan, and
    `variance` is the optimum of the relaxation.
    """

    batch: int
    seconds: float
    bound: float
    variance: float
    plan: Asked | None = field(repr=False)
    budget: float = 1.0
    relaxed: bool = False


class JointLevels:
    """Levels of all device classes that were solved so far.

    Attributes:
        sized: the problem with variable batches.
        before: samples per device of each class; they stay if `given_batches`.
        min_batch: least samples per device.
        until: end of the search, in seconds of `time.monotonic`.
        counts: number of devices of each class.
    """

    def __init__(
        self,
        sized: SizedProblems,
        before: Mapping[str, int],
        min_batch: int,
        given_batches: bool,
        until: float,
    ) -> None:
        self.sized, self.before, self.min_batch, self.until = sized, before, min_batch, until
        self.given_batches = given_batches
        problem = sized.requested
        self.counts = {name: item.count for name, item in problem.cluster.devices.items()}
        self.part = functools.cache(self._part)
        self._budgets: Sequence[float] = ()
        self._levels: dict[str, list[Level]] = {name: [] for name in problem.classes}
        self._level = functools.cache(self._solve_level)
        self._bound = functools.cache(self._class_bound)
        self._idle = functools.cache(lambda name: _idle(sized.part(name, before[name])))
        self._evaluator = functools.cache(self._class_evaluator)
        self._least = {
            name: _least_variance(part) * before[name] for name, part in problem.classes.items()
        }

    def allow_recomputation(self, budgets: Sequence[float]) -> None:
        """Allow activation memory budgets below 1 from now on.

        Relaxations stay, since they have no limit of the memory; levels of fixed plans have one.
        """
        self._budgets = budgets
        for name, levels in self._levels.items():
            is_fixed = self.sized.requested.classes[name].fixed_plan is not None
            self._levels[name] = [lv for lv in levels if lv.relaxed and not is_fixed]

    def total(self, batches: Mapping[str, int]) -> int:
        """Return the samples of a step."""
        return sum(self.counts[name] * batch for name, batch in batches.items())

    # Bounds

    def pending(
        self, batches: Mapping[str, int], samples: int, seconds: float, relaxed: bool
    ) -> list[tuple[str, int, bool]]:
        """Return levels to solve next, to raise the lower bound of some batches.

        A level is a class, a batch, and whether only its relaxation is solved. Relaxations come
        first, at a batch with a relaxation for another limit, or half-way between the class's batch
        and the level below it. Classes whose least variance at the batch is known are left out.
        """
        relaxations, programs = list[tuple[str, int, bool]](), list[tuple[str, int, bool]]()
        for name, batch in batches.items():
            estimates: tuple[Estimate, Estimate] = ("lower", "relaxed" if relaxed else "upper")
            lower, upper = (
                self.costs(name, samples, seconds, estimate)[batch] for estimate in estimates
            )
            if upper * (1 - INNER_GAP) <= lower:
                continue
            levels = [level for level in self._levels[name] if level.seconds >= seconds]
            exact = [lv for lv in levels if lv.batch == batch and lv.seconds == seconds]
            if not exact:
                least = batch if self.given_batches else self.min_batch
                below = max((lv.batch for lv in levels if lv.batch <= batch), default=least - 1)
                shared = [lv.batch for lv in self._levels[name] if below < lv.batch <= batch]
                relaxations.append((name, max(shared, default=(below + batch + 1) // 2), True))
            elif not relaxed and all(level.relaxed for level in exact):
                programs.append((name, batch, False))
        return relaxations or programs

    def costs(self, name: str, samples: int, seconds: float, estimate: Estimate) -> Array:
        """Return the variance that a class adds to the mean gradient, by batch.

        It is infinite if there is none of the kind.
        """
        allowed = self._range(name, samples)
        batches = np.arange(len(allowed))
        each = np.full(len(allowed), self._least[name] if estimate == "lower" else math.inf)
        for level in self._levels[name]:
            if estimate == "lower":
                if level.seconds >= seconds:
                    each[level.batch :] = np.maximum(each[level.batch :], level.bound)
            elif level.seconds <= seconds and level.relaxed == (estimate == "relaxed"):
                each[: level.batch + 1] = np.minimum(each[: level.batch + 1], level.variance)
        result, finite = np.full(len(allowed), math.inf), allowed & np.isfinite(each)
        result[finite] = each[finite] * batches[finite] * self.counts[name] / samples**2
        return result

    def assign(
        self, samples: int, seconds: float, estimate: Estimate
    ) -> tuple[float, dict[str, int]]:
        """Return the least variance of a global batch, and the batches with it; {} if none."""
        costs = {name: self.costs(name, samples, seconds, estimate) for name in self.counts}
        return self._assign(costs, samples)

    def is_possible(self, samples: int) -> bool:
        """Return whether batches in the allowed range have a total of `samples`."""
        zeros = {name: np.where(self._range(name, samples), 0.0, math.inf) for name in self.counts}
        return bool(self._assign(zeros, samples)[1])

    def _assign(self, costs: Mapping[str, Array], samples: int) -> tuple[float, dict[str, int]]:
        """Return the least sum of costs of a global batch, and the batches with it; {} if none."""
        unit = math.gcd(*self.counts.values())
        if samples % unit:
            return math.inf, {}
        total = samples // unit
        best, chosen = np.full(total + 1, math.inf), list[tuple[str, int, NDArray[np.int64]]]()
        best[0] = 0.0
        for name, by_batch in costs.items():
            width = self.counts[name] // unit
            following, picks = np.full(total + 1, math.inf), np.zeros(total + 1, dtype=np.int64)
            for batch in np.flatnonzero(np.isfinite(by_batch)).tolist():
                if batch * width > total:
                    break
                now = best[: total + 1 - batch * width] + by_batch[batch]
                part = following[batch * width :]
                less = now < part
                part[less] = now[less]
                picks[batch * width :][less] = batch
            best = following
            chosen.append((name, width, picks))
        if not math.isfinite(best[total]):
            return math.inf, {}
        batches, left = dict[str, int](), total
        for name, width, picks in reversed(chosen):
            batches[name] = int(picks[left])
            left -= width * batches[name]
        return float(best[total]), {name: batches[name] for name in costs}

    def _range(self, name: str, samples: int) -> NDArray[np.bool_]:
        """Return which batches of a class are allowed in a step, from 0."""
        if self.given_batches:
            return np.equal(np.arange(self.before[name] + 1), self.before[name])
        least, count = self.min_batch, self.counts[name]
        most = (samples - least * (self.sized.requested.cluster.ranks - count)) // count
        return np.arange(max(most, 0) + 1) >= least

    # Plans

    def plans(self, batches: Mapping[str, int], seconds: float) -> dict[str, Level] | None:
        """Return the best solved level of each class; None if a class has none.

        A class may use a level with more samples.
        """
        result = {}
        for name, batch in batches.items():
            levels: Iterator[Level] = (
                level
                for level in self._levels[name]
                if level.plan is not None and level.batch >= batch and level.seconds <= seconds
            )
            best = min(levels, key=lambda level: level.variance, default=None)
            if best is None:
                return None
            result[name] = best
        return result

    def _part(self, name: str, batch: int, budget: float) -> DeviceClass:
        """Return a class with a batch and an activation memory budget."""
        part = recomputing(self.sized.part(name, batch), budget)
        return replace(part, times=CachedTimes.of(part.times))

    # Solution of one class

    def solve(self, name: str, batch: int, seconds: float, relaxed: bool) -> None:
        """Solve a level, or its relaxation, unless it is solved."""
        key = batch, seconds, relaxed
        if any((lv.batch, lv.seconds, lv.relaxed) == key for lv in self._levels[name]):
            return
        if relaxed and self.sized.requested.classes[name].fixed_plan is None:
            program, weight = self._bound(name, batch)
            bound = max(program.variance(seconds) * batch / weight, self._least[name])
            self._levels[name].append(Level(batch, seconds, bound, bound, None, relaxed=True))
            return
        # Programs without a limit of the memory are faster, and most plans fit.
        level = unlimited = self._level(name, batch, seconds, None)
        if unlimited.plan is not None and not self._fits(name, batch, unlimited.plan):
            level = self._level(name, batch, seconds, 1.0)
            bound = level.bound
            for budget in self._budgets if may_recompute(self.sized.part(name, batch)) else ():
                if level.variance * (1 - INNER_GAP) <= unlimited.variance:
                    bound = min(bound, unlimited.bound)
                    break
                other = self._level(name, batch, seconds, budget)
                bound = min(bound, other.bound)
                level = min(level, other, key=lambda item: item.variance)
            level = replace(level, bound=max(bound, unlimited.bound))
        self._levels[name].append(level)
        if relaxed:
            exact = replace(level, plan=None, variance=level.bound, relaxed=True)
            self._levels[name].append(exact)

    def _fits(self, name: str, batch: int, plan: Asked) -> bool:
        """Return whether a plan of a class fits into its memory without recomputation."""
        limit = self.sized.requested.classes[name].memory
        return limit is None or not beyond(self.sized.peak(name, batch, plan) or 0, limit)

    def _class_bound(self, name: str, batch: int) -> tuple[ClassBound, float]:
        """Return the relaxed program of a class without a limit of the memory, and its weight."""
        problem = self._alone(name, batch, None, None)
        costs = StateCosts(problem.classes[name])
        neighbours = NeighbourTerms(problem.classes[name]) if costs.differ else costs
        return ClassBound(problem, self._evaluator(name), neighbours), problem.weight(name)

    def _class_evaluator(self, name: str) -> PlanEvaluator:
        """Return an evaluator with a class's gradient buckets, which do not depend on its batch."""
        problem = self._alone(name, self.before[name], None, None)
        return PlanEvaluator(problem, problem.uniform())

    def _solve_level(self, name: str, batch: int, seconds: float, budget: float | None) -> Level:
        """Return the level of an activation memory budget; None: without a limit of the memory."""
        problem = self._alone(name, batch, seconds, budget)
        part, spent = problem.classes[name], budget or 1.0
        if part.fixed_plan is not None:
            fits = not evaluate_plan(problem, problem.uniform()).exceeds(problem)
            plan = part.fixed_plan if fits else None
            bound = part.variance(part.fixed_plan) * batch if fits else math.inf
            return Level(batch, seconds, bound, bound, plan, spent)
        state = self.exact(problem)
        proved = state.lower_bound if state.is_approximate else state.program_bound
        if state.incumbent is None:
            infeasible = proved == math.inf or not (state.is_approximate or state.notes)
            bound = math.inf if infeasible else self._least[name]
            return Level(batch, seconds, bound, math.inf, None, spent)
        plan = state.incumbent.plans[name]
        variance = part.variance(plan) * batch
        bound = max(self._least[name], (proved or 0.0) / problem.weight(name) * batch)
        return Level(batch, seconds, min(bound, variance), variance, plan, spent)

    def exact(self, problem: Problem, gap: float = INNER_GAP) -> SearchState:
        """Return the exact program's state after its search in the remaining time."""
        search = MilpSearch(problem, gap, max(1.0, self.until - time.monotonic()))
        search.solve(_ROUNDS)
        return search.state

    def _alone(self, name: str, batch: int, seconds: float | None, budget: float | None) -> Problem:
        """Return the problem of one class in the cluster, whose other devices need no time.

        `budget` is its activation memory budget; None: without a limit of the memory.
        """
        result = self.sized.problem({**self.before, name: batch})
        part = self.part(name, batch, budget or 1.0)
        if budget is None:
            part = replace(part, memory=None, training=None)
        classes = {other: self._idle(other) for other in result.classes} | {name: part}
        devices = {
            other: device
            if other == name
            else replace(device, slowdown=_IDLE, delay=0.0, launch=0.0, copies=0.0)
            for other, device in result.cluster.devices.items()
        }
        if classes[name].fixed_plan is None:
            for other in classes.keys() - {name}:
                plan = classes[other].uniform(classes[other].widest)
                classes[other] = replace(classes[other], fixed_plan=plan)
        limit = None if seconds is None or math.isinf(seconds) else seconds
        cluster = replace(result.cluster, devices=devices)
        return Problem(classes, cluster, seconds=limit, tied=result.tied)


def _idle(part: DeviceClass) -> DeviceClass:
    """Return a class that has neither variance nor a limit of memory."""
    variance = {op: dict.fromkeys(by, 0.0) for op, by in part.sensitivity.variance.items()}
    sensitivity = replace(part.sensitivity, variance=variance, trace=())
    return replace(part, sensitivity=sensitivity, memory=None, training=None)


def _least_variance(part: DeviceClass) -> float:
    """Return the least variance of a device over all plans."""
    if part.fixed_plan is not None:
        return part.variance(part.fixed_plan)
    return sum(
        min(part.omega(operator, fmt) for fmt in formats)
        for operator, formats in part.choices.items()
    )
