"""Joint choice of batches, formats and recomputation of all device classes, with a certified gap.

Classes depend on each other only through the samples of a step: the slowest class determines the
seconds of a step, and its transfers do not depend on batches and formats. The problem is therefore
decomposed. For a class, a batch and a limit of the seconds, a program (`MilpSearch`) returns the
least variance of a sample with a lower bound. A dynamic program over the samples of a step combines
the classes: from lower bounds it bounds all joint plans, from plans it proposes batches, which
`PlanEvaluator` evaluates.

Programs are solved only where the bound needs them. A step with fewer samples is assumed to be no
slower and to need no more memory, so a bound is valid for larger batches and shorter steps, too.

If memory limits a class, it may recompute activations within a memory budget. The search first runs
without recomputation, so that its plan is never worse than the plan without.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from qsync_fx.allocator.baselines import (
    DynamicBatches,
    Resized,
    SizedProblems,
    full,
    local_batches,
)
from qsync_fx.allocator.evaluator import (
    TOLERANCE,
    Evaluation,
    beyond,
    evaluate_plan,
    may_recompute,
    recomputing,
)
from qsync_fx.allocator.feasibility import unfit
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.milp.search import MilpSearch, SearchState
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Asked, DeviceClass, Plans, Problem
from qsync_fx.errors import OptionError, PlanError

Array = NDArray[np.float64]

GAP: Final = 0.01
SECONDS: Final = 60.0
BUDGETS: Final = (0.75, 0.5, 0.25)
"""Activation memory budgets of a class that recomputes."""
_INNER_GAP: Final = 1e-3
_START_GAP: Final = 1e-6
"""Gap of the exact plans of equal batches, which may be the limit of the variance."""
_ROUNDS: Final = 4
_SIZES: Final = 17
"""Maximum number of global batches of a range that are compared."""
_IDLE: Final = 1e-12
"""Slowdown of the devices of all classes but one, so that they never determine a step."""


@dataclass(frozen=True)
class JointBatches:
    """Allocator of local batches and formats: dynamic program over classes, exact programs inside.

    Attributes:
        resized: constructor of a device class with another batch.
        samples: least and most samples of a step of the cluster; None for the problem's samples.
            With other samples the limit of the seconds changes in proportion, so that the
            throughput is no lower.
        min_batch: least samples per device, such as for the statistics of batch norms.
        gap: gap between plan and bound at which the search ends, relative to the objective.
        seconds: time limit of the search; the best plan so far is used after it.
        budgets: activation memory budgets below 1 that a class with limited memory may have.
        given_batches: whether the batches of the problem stay.
    """

    resized: Resized
    samples: tuple[int, int] | None = None
    min_batch: int = 1
    gap: float = GAP
    seconds: float = SECONDS
    budgets: tuple[float, ...] = ()
    given_batches: bool = False

    @property
    def name(self) -> str:
        return "joint"

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the best plan with its batches; raise `PlanError` if none meets the limits."""
        began = time.perf_counter()
        if problem.least == "seconds" and len({*(self.samples or ())}) == 2:
            message = "the seconds of steps with different numbers of samples are not comparable"
            do = 'plan with batch="global", or minimize the variance, with the objective hybrid'
            raise OptionError(message, where="batch", do=do)
        if problem.coding is not None:
            return self._with_codecs(problem)
        search = _Search(problem, self)
        search.evaluate_single_choices()
        bound = search.minimize()
        if self.budgets and any(part.memory is not None for part in problem.classes.values()):
            search.allow_recomputation()
            bound = search.minimize()
        best = search.best
        if best is None and not search.tried:
            do = "allow smaller batches, more seconds, more memory or more variance"
            raise PlanError("no plan was found with batches in the requested range", do=do)
        if best is None:
            raise unfit(problem, search.tried)
        notes = search.notes(best)
        return PlanResult(
            best.problem,
            best.plans,
            best.evaluation,
            self.name,
            bound=min(bound, best.evaluation.value(problem)),
            took=time.perf_counter() - began,
            notes=tuple(notes),
            batches={} if self.given_batches else best.batches,
            memory_budgets=best.budgets,
        )

    def _with_codecs(self, problem: Problem) -> PlanResult:
        """Return the best plan with codecs for the batches of joint plans without codecs.

        One joint plan is for the network, the other for transfers that take no time, which bounds
        all plans with codecs.
        """
        began, unable = time.perf_counter(), list[PlanError]()
        share = replace(self, seconds=self.seconds / 4)
        plain = replace(problem, coding=None)
        instant = replace(plain, cluster=plain.cluster.without_transfers())
        bounding = share.allocate(instant)
        proposals, results = [bounding], list[PlanResult]()
        try:
            proposals.append(share.allocate(plain))
        except PlanError as error:
            unable.append(error)
        for proposal in proposals:
            devices = {
                name: replace(device, batch=proposal.problem.cluster.devices[name].batch)
                for name, device in problem.cluster.devices.items()
            }
            cluster = replace(problem.cluster, devices=devices)
            classes, limit = proposal.problem.classes, proposal.problem.seconds
            sized = replace(problem, classes=classes, cluster=cluster, seconds=limit)
            if proposal is not bounding:
                evaluation = evaluate_plan(sized, proposal.plans)
                results.append(replace(proposal, problem=sized, evaluation=evaluation))
            try:
                exact = MilpAllocator(gap=self.gap, seconds=share.seconds).allocate(sized)
            except PlanError as error:
                unable.append(error)
                continue
            result = replace(
                exact,
                batches=proposal.batches,
                memory_budgets=proposal.memory_budgets,
                notes=(*proposal.notes, *exact.notes),
            )
            results.append(result)
        if not results:
            raise unable[-1]
        best = min(results, key=lambda result: result.value)
        bound, took = min(bounding.bound or 0.0, best.value), time.perf_counter() - began
        return replace(best, allocator=self.name, bound=bound, took=took)

    def balanced_seconds(self, problem: Problem) -> float:
        """Return the seconds of a step in the narrowest formats, with batches by speed."""
        balanced = DynamicBatches(self.resized, Problem.uniform, self.min_batch)
        answer = balanced.allocate(problem)
        samples, planned = problem.cluster.samples, answer.problem.cluster.samples
        return answer.evaluation.seconds * (samples or 1) / (planned or 1)


@dataclass(frozen=True)
class _Joint:
    """Evaluated batches and plans."""

    problem: Problem = field(repr=False)
    batches: Mapping[str, int]
    plans: Plans = field(repr=False)
    evaluation: Evaluation
    budgets: Mapping[str, float]


@dataclass(frozen=True)
class _Level:
    """Solution for a class, a batch, a limit of the seconds, and an activation memory budget.

    Variances are per sample: the variance of a device's gradient, times its batch. `plan` is None
    if no plan was found, and `bound` is infinite if there is none.
    """

    batch: int
    seconds: float
    bound: float
    variance: float
    plan: Asked | None = field(repr=False)
    budget: float = 1.0


class _Search:
    """Levels that were solved, and the best joint plan that meets all limits."""

    def __init__(self, problem: Problem, settings: JointBatches) -> None:
        self.problem, self._settings = problem, settings
        self.best: _Joint | None = None
        self.tried: list[Evaluation] = []
        self.stopped = False
        self._end = time.monotonic() + settings.seconds
        self._sized = SizedProblems(problem, settings.resized)
        self._before = _given_batches(problem) if settings.given_batches else local_batches(problem)
        self._budgets: tuple[float, ...] = ()
        self._counts = {name: item.count for name, item in problem.cluster.devices.items()}
        self._samples = self._total(self._before)
        self._sizes = self._global_batches()
        self._levels: dict[str, list[_Level]] = {name: [] for name in problem.classes}
        self._level = functools.cache(self._solve_level)
        self._part = functools.cache(self._recomputing)
        self._variances: dict[tuple[tuple[str, int, int], ...], tuple[float, float]] = {}
        self._least = {
            name: _least_variance(part) * self._before[name]
            for name, part in problem.classes.items()
        }

    def _global_batches(self) -> list[int]:
        """Return the samples of a step to choose from; all are possible with these devices."""
        least, most = self._settings.samples or (self._samples, self._samples)
        smallest = self._settings.min_batch * self.problem.cluster.ranks
        if self._settings.min_batch < 1 or most < max(least, smallest):
            message = f"no step has {least} to {most} samples, with {self._settings.min_batch} or "
            message += f"more on each of {self.problem.cluster.ranks} devices"
            do = "allow more samples, or smaller batches on a device"
            raise OptionError(message, where="batch", do=do)
        unit = math.gcd(*self._counts.values())
        multiples = range(-(-max(least, smallest) // unit), most // unit + 1)
        picked = np.linspace(0, len(multiples) - 1, min(_SIZES, len(multiples))).round()
        sizes = {unit * multiples[int(index)] for index in picked}
        if least <= self._samples <= most:
            sizes.add(self._samples)
        flat = {
            name: np.where(self._range(name, max(sizes)), 0.0, math.inf) for name in self._counts
        }
        return [size for size in sorted(sizes) if self._assign(flat, size)[1]]

    # Objectives

    def minimize(self) -> float:
        """Search for the best plan by the problem's objective; return a lower bound."""
        if self.problem.least == "variance":
            return self.least_variance(self.problem.seconds)
        return self.least_seconds()

    def allow_recomputation(self) -> None:
        """Allow activation memory budgets below 1 from now on."""
        self._budgets = self._settings.budgets
        self._levels = {name: [] for name in self.problem.classes}

    def evaluate_single_choices(self) -> None:
        """Evaluate uniform plans, also with batches in proportion to speed, and exact plans of the
        given batches: of the problem, and of least variance within the time of each uniform plan.
        """
        names = dict.fromkeys(fmt for part in self.problem.classes.values() for fmt in part.formats)
        choices: list[Callable[[Problem], Plans]] = [full]
        choices += [partial(_in_format, fmt=name) for name in names]
        problems = [self.problem]
        for plans in choices:
            uniform = self._evaluate(self._before, plans(self.problem))
            if uniform is not None and self.problem.least == "seconds":
                limits: dict[str, Any] = {"seconds": uniform.seconds, "variance": None}
                problems.append(replace(self.problem, least="variance", **limits))
            if not self._settings.given_batches:
                settings = self._settings
                balanced = DynamicBatches(settings.resized, plans, settings.min_batch)
                answer = balanced.allocate(self.problem)
                self._evaluate(answer.batches, answer.plans)
        for problem in problems:
            equal = self._exact(problem, _START_GAP)
            if equal.incumbent is not None:
                self._evaluate(self._before, equal.incumbent.plans)

    def least_variance(self, seconds: float | None, until: float | None = None) -> float:
        """Search for the least variance with a step of at most `seconds`; return a lower bound.

        The search also ends when it is known whether the least variance is at most `until`.
        """
        limits = {size: self._limit(seconds, size) for size in self._sizes}
        starts: list[Mapping[str, int]] = [self._before] if until is None else []
        starts += [] if self.best is None else [self.best.batches]
        for batches in starts:
            limit = self._limit(seconds, self._total(batches))
            for name, batch in batches.items():
                self._solve(name, batch, limit)
            self._evaluate_levels(batches, limit)
        best = math.inf
        if self.best is not None and self.problem.least == "variance":
            best = self.best.evaluation.variance
        while True:
            bound, size, batches = math.inf, 0, {}
            for samples, limit in limits.items():
                uppers = {name: self._costs(name, samples, limit, False) for name in self._counts}
                if proposal := self._assign(uppers, samples)[1]:
                    best = min(best, self._evaluate_levels(proposal, limit))
                lowers = {name: self._costs(name, samples, limit, True) for name in self._counts}
                value, chosen = self._assign(lowers, samples)
                if value < bound:
                    bound, size, batches = value, samples, chosen
            if bound == math.inf or best * (1 - self._settings.gap) <= bound:
                return bound
            if until is not None and (not beyond(best, until) or beyond(bound, until)):
                return bound
            pending = list(self._pending(batches, size, limits[size]))
            self.stopped |= bool(pending) and time.monotonic() > self._end
            if not pending or self.stopped:
                return bound
            for name, batch in pending:
                self._solve(name, batch, limits[size])

    def least_seconds(self) -> float:
        """Search for the least seconds within the limit of the variance; return a lower bound.

        Limits of the seconds shrink by growing steps until no plan meets one, then bisect.
        """
        budget, gap = self.problem.variance, self._settings.gap
        assert budget is not None
        lower, share, undecided = 0.0, gap, math.inf
        if self.best is None:
            self.least_variance(None, budget)
        while self.best is not None and not self.stopped:
            # Limits that programs do not decide leave a gap, but shorter ones may still be refuted.
            upper = min(self.best.evaluation.seconds, undecided)
            if upper - lower <= gap * upper * (1 + TOLERANCE):
                break
            limit = upper * (1 - share)
            if lower:
                limit = min(upper * (1 - gap), max(limit, (upper + lower) / 2))
            bound = self.least_variance(limit, budget)
            if beyond(bound, budget):
                lower, share = limit, gap
            elif beyond(self.best.evaluation.seconds, limit):
                undecided = limit
            share = min(2 * share, 0.5)
        return lower

    # Plans

    def notes(self, best: _Joint) -> list[PlanNote]:
        """Return the notes on batches, recomputation and the time limit of the search."""
        notes = []
        for name, batch in best.batches.items():
            numbers: dict[str, float] = {"batch": batch, "before": self._before[name]}
            if not self._settings.given_batches:
                notes.append(PlanNote(PlanNoteKind.PLANNED_BATCH, name, numbers=numbers))
        if best.budgets:
            saving = evaluate_plan(self._problem(best.batches, {}), best.plans).classes
        for name, budget in best.budgets.items():
            now, before = best.evaluation.classes[name], saving[name]
            numbers = {"budget": budget, "seconds more": now.computing - before.computing}
            numbers["memory without it"] = before.peak_bytes or 0
            notes.append(PlanNote(PlanNoteKind.RECOMPUTES, name, numbers=numbers))
        if self.stopped:
            numbers = {"seconds": self._settings.seconds}
            notes.append(PlanNote(PlanNoteKind.STOPPED, numbers=numbers))
        return notes

    def _problem(self, batches: Mapping[str, int], budgets: Mapping[str, float]) -> Problem:
        """Return the problem with batches, and activation memory budgets below 1 by class."""
        problem = self.problem
        if not self._settings.given_batches:
            problem = self._sized.problem(batches)
        parts = {name: self._part(name, batches[name], budgets[name]) for name in budgets}
        return replace(problem, classes={**problem.classes, **parts})

    def _recomputing(self, name: str, batch: int, budget: float) -> DeviceClass:
        return recomputing(self._sized.part(name, batch), budget)

    def _evaluate(
        self,
        batches: Mapping[str, int],
        plans: Plans,
        budgets: Mapping[str, float] = MappingProxyType({}),
    ) -> Evaluation | None:
        """Evaluate plans, and keep them if they are the best; return None for forbidden batches."""
        least, most = self._settings.samples or (self._samples, self._samples)
        samples = self._total(batches)
        if not least <= samples <= most or min(batches.values()) < self._settings.min_batch:
            return None
        problem = self._problem(batches, budgets)
        if problem.seconds is not None:
            problem = replace(problem, seconds=self._limit(problem.seconds, samples))
        plans = problem.completed(plans)
        evaluation = evaluate_plan(problem, plans)
        self.tried.append(evaluation)
        if evaluation.exceeds(problem):
            return evaluation
        if self.best is None or self._order(evaluation) < self._order(self.best.evaluation):
            self.best = _Joint(problem, dict(batches), plans, evaluation, dict(budgets))
        return evaluation

    def _order(self, evaluation: Evaluation) -> tuple[float, float]:
        if self.problem.least == "variance":
            return evaluation.variance, evaluation.seconds
        return evaluation.seconds, evaluation.variance

    def _evaluate_levels(self, batches: Mapping[str, int], seconds: float) -> float:
        """Return the variance of the best plans of solved levels; infinite without plans in time.

        Each class uses the plan of a level with at least as many samples.
        """
        levels: dict[str, _Level] = {}
        for name, batch in batches.items():
            fitting = [
                level
                for level in self._levels[name]
                if level.plan is not None and level.batch >= batch and level.seconds <= seconds
            ]
            if not fitting:
                return math.inf
            levels[name] = min(fitting, key=lambda level: level.variance)
        key = tuple((name, batches[name], id(level)) for name, level in levels.items())
        if key not in self._variances:
            plans = {name: level.plan or {} for name, level in levels.items()}
            budgets = {name: level.budget for name, level in levels.items() if level.budget < 1.0}
            evaluation = self._evaluate(batches, plans, budgets)
            variance, took = math.inf, math.inf
            if evaluation is not None and self._memory_fits(evaluation):
                variance, took = evaluation.variance, evaluation.seconds
            self._variances[key] = variance, took
        variance, took = self._variances[key]
        return math.inf if beyond(took, seconds) else variance

    def _memory_fits(self, evaluation: Evaluation) -> bool:
        exceeded = evaluation.exceeds(self.problem)
        return not any(subject.startswith("memory") for subject in exceeded)

    # Bounds

    def _pending(
        self, batches: Mapping[str, int], samples: int, seconds: float
    ) -> Iterator[tuple[str, int]]:
        """Yield levels to solve next: half-way between a class's batch and the level below it.

        A level of a longer limit counts as one below. Classes whose least variance at the batch is
        known are left out.
        """
        for name, batch in batches.items():
            lower, upper = (
                self._costs(name, samples, seconds, bounds)[batch] for bounds in (True, False)
            )
            if upper * (1 - _INNER_GAP) <= lower:
                continue
            longer = {lv.batch for lv in self._levels[name] if lv.seconds >= seconds}
            if any(lv.batch == batch and lv.seconds == seconds for lv in self._levels[name]):
                continue
            least = batch if self._settings.given_batches else self._settings.min_batch
            below = max((b for b in longer if b <= batch), default=least - 1)
            yield name, (below + batch + 1) // 2

    def _costs(self, name: str, samples: int, seconds: float, bounds: bool) -> Array:
        """Return the variance that a class adds to the mean gradient, by batch.

        It is a lower bound, or the variance of a solved plan; infinite without a plan.
        """
        allowed = self._range(name, samples)
        batches = np.arange(len(allowed))
        each = np.full(len(allowed), self._least[name] if bounds else math.inf)
        for level in self._levels[name]:
            if bounds and level.seconds >= seconds:
                each[level.batch :] = np.maximum(each[level.batch :], level.bound)
            if not bounds and level.seconds <= seconds and level.plan is not None:
                each[: level.batch + 1] = np.minimum(each[: level.batch + 1], level.variance)
        result, finite = np.full(len(allowed), math.inf), allowed & np.isfinite(each)
        result[finite] = each[finite] * batches[finite] * self._counts[name] / samples**2
        return result

    def _range(self, name: str, samples: int) -> NDArray[np.bool_]:
        """Return which batches of a class are allowed in a step, from 0."""
        if self._settings.given_batches:
            return np.equal(np.arange(self._before[name] + 1), self._before[name])
        least, count = self._settings.min_batch, self._counts[name]
        most = (samples - least * (self.problem.cluster.ranks - count)) // count
        return np.arange(max(most, 0) + 1) >= least

    def _assign(self, costs: Mapping[str, Array], samples: int) -> tuple[float, dict[str, int]]:
        """Return the least sum of costs of a global batch, and the batches with it; {} if none."""
        unit = math.gcd(*self._counts.values())
        if samples % unit:
            return math.inf, {}
        total = samples // unit
        best, chosen = np.full(total + 1, math.inf), list[tuple[str, int, NDArray[np.int64]]]()
        best[0] = 0.0
        for name, by_batch in costs.items():
            width = self._counts[name] // unit
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

    # Solution of one class

    def _solve(self, name: str, batch: int, seconds: float) -> None:
        """Solve a level, unless it is solved."""
        levels = self._levels[name]
        if any(level.batch == batch and level.seconds == seconds for level in levels):
            return
        # Programs without a limit of the memory are faster, and most plans fit.
        level = unlimited = self._level(name, batch, seconds, None)
        if unlimited.plan is not None and not self._fits(name, batch, unlimited.plan):
            level = self._level(name, batch, seconds, 1.0)
            bound = level.bound
            for budget in self._budgets if may_recompute(self._sized.part(name, batch)) else ():
                if level.variance * (1 - _INNER_GAP) <= unlimited.variance:
                    bound = min(bound, unlimited.bound)
                    break
                other = self._level(name, batch, seconds, budget)
                bound = min(bound, other.bound)
                level = min(level, other, key=lambda item: item.variance)
            level = replace(level, bound=max(bound, unlimited.bound))
        levels.append(level)

    def _fits(self, name: str, batch: int, plan: Asked) -> bool:
        """Return whether a plan of a class fits into its memory without recomputation."""
        if self._sized.part(name, batch).memory is None:
            return True
        problem = self._alone(name, batch, math.inf, 1.0)
        return self._memory_fits(
            evaluate_plan(problem, problem.completed({**problem.uniform(), name: plan}))
        )

    def _solve_level(self, name: str, batch: int, seconds: float, budget: float | None) -> _Level:
        """Return the level of an activation memory budget; None: without a limit of the memory."""
        problem = self._alone(name, batch, seconds, budget)
        part, spent = problem.classes[name], budget or 1.0
        if part.fixed_plan is not None:
            fits = not evaluate_plan(problem, problem.uniform()).exceeds(problem)
            plan = part.fixed_plan if fits else None
            bound = part.variance(part.fixed_plan) * batch if fits else math.inf
            return _Level(batch, seconds, bound, bound, plan, spent)
        state = self._exact(problem)
        proved = state.lower_bound if state.is_approximate else state.program_bound
        if state.incumbent is None:
            infeasible = proved == math.inf or not (state.is_approximate or state.notes)
            bound = math.inf if infeasible else self._least[name]
            return _Level(batch, seconds, bound, math.inf, None, spent)
        plan = state.incumbent.plans[name]
        variance = part.variance(plan) * batch
        bound = max(self._least[name], (proved or 0.0) / problem.weight(name) * batch)
        return _Level(batch, seconds, min(bound, variance), variance, plan, spent)

    def _exact(self, problem: Problem, gap: float = _INNER_GAP) -> SearchState:
        """Return the exact program's state after its search in the remaining time."""
        search = MilpSearch(problem, gap, max(1.0, self._end - time.monotonic()))
        search.solve(_ROUNDS)
        return search.state

    def _alone(self, name: str, batch: int, seconds: float, budget: float | None) -> Problem:
        """Return the problem of one class in the cluster, whose other devices need no time.

        `budget` is its activation memory budget; None: without a limit of the memory.
        """
        result = self._sized.problem({**self._before, name: batch})
        part = self._part(name, batch, budget or 1.0)
        if budget is None:
            part = replace(part, memory=None, training=None)
        result = replace(result, classes={**result.classes, name: part})
        classes = {
            other: part if other == name else _idle(part) for other, part in result.classes.items()
        }
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
        limit = None if math.isinf(seconds) else seconds
        cluster = replace(result.cluster, devices=devices)
        return Problem(classes, cluster, seconds=limit, tied=result.tied)

    def _limit(self, seconds: float | None, samples: int) -> float:
        """Return the limit of a step with other samples, at the same throughput."""
        return math.inf if seconds is None else seconds * samples / self._samples

    def _total(self, batches: Mapping[str, int]) -> int:
        return sum(self._counts[name] * batch for name, batch in batches.items())


def _idle(part: DeviceClass) -> DeviceClass:
    """Return a class that has neither variance nor a limit of memory."""
    variance = {op: dict.fromkeys(by, 0.0) for op, by in part.sensitivity.variance.items()}
    sensitivity = replace(part.sensitivity, variance=variance, trace=())
    return replace(part, sensitivity=sensitivity, memory=None, training=None)


def _in_format(problem: Problem, fmt: str) -> Plans:
    """Return the plans with a format in all classes that have it, and the widest in the others."""
    return problem.completed(
        {
            name: part.uniform(fmt if fmt in part.formats else part.widest)
            for name, part in problem.classes.items()
            if part.fixed_plan is None
        }
    )


def _least_variance(part: DeviceClass) -> float:
    """Return the least variance of a device over all plans."""
    if part.fixed_plan is not None:
        return part.variance(part.fixed_plan)
    return sum(
        min(part.omega(operator, fmt) for fmt in formats)
        for operator, formats in part.choices.items()
    )


def _given_batches(problem: Problem) -> dict[str, int]:
    """Return the samples per device of each class; 1 for all classes if any is unknown."""
    devices = problem.cluster.devices
    batches = {name: device.batch or 1 for name, device in devices.items()}
    return batches if problem.cluster.samples is not None else dict.fromkeys(batches, 1)
