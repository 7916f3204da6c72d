"""Joint choice of batches, formats and recomputation of all device classes, with a certified gap.

Classes depend on each other only through the samples of a step: the slowest class determines the
seconds of a step, and its transfers do not depend on batches and formats. The problem is therefore
decomposed. `JointLevels` bounds the variance of each class within a limit of the seconds and finds
its plans. From bounds, its dynamic program bounds all joint plans; from plans, it proposes batches,
which `PlanEvaluator` evaluates. Programs are solved only where the bound needs them.

If memory limits a class, it may recompute activations within a memory budget. The search first runs
without recomputation, so that its plan is never worse than the plan without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np

from qsync_fx.allocator.baselines import (
    DynamicBatches,
    Resized,
    SizedProblems,
    balanced_batches,
    full,
    local_batches,
)
from qsync_fx.allocator.evaluator import (
    TOLERANCE,
    Evaluation,
    beyond,
    evaluate_plan,
    without_peaks,
)
from qsync_fx.allocator.feasibility import unfit
from qsync_fx.allocator.joint_levels import JointLevels
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Plans, Problem
from qsync_fx.errors import OptionError, PlanError

GAP: Final = 0.01
SECONDS: Final = 60.0
BUDGETS: Final = (0.75, 0.5, 0.25)
"""Activation memory budgets of a class that recomputes."""
_START_GAP: Final = 1e-6
"""Gap of the exact plans of equal batches, which may be the limit of the variance."""
_RELAXED_GAP: Final = 2e-3
"""Gap at which the bisection of the seconds by relaxations ends."""
_SIZES: Final = 17
"""Maximum number of global batches of a range that are compared."""


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
        search.evaluate_uniform_plans()
        bound = search.minimize()
        search.solve_equal_batches()
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


class _Search:
    """Search for the best joint plan that meets all limits."""

    def __init__(self, problem: Problem, settings: JointBatches) -> None:
        self.problem, self._settings = problem, settings
        self.best: _Joint | None = None
        self.tried: list[Evaluation] = []
        self.stopped, self._refuted = False, 0.0
        fixed = settings.given_batches
        self._before = _given_batches(problem) if fixed else local_batches(problem)
        self._sized = SizedProblems(problem, settings.resized)
        until = time.monotonic() + settings.seconds
        self._levels = JointLevels(self._sized, self._before, settings.min_batch, fixed, until)
        self._samples = self._levels.total(self._before)
        self._sizes = self._global_batches()
        self._variances: dict[tuple[tuple[str, int, int], ...], tuple[float, float]] = {}

    def _global_batches(self) -> list[int]:
        """Return the samples of a step to choose from; all are possible with these devices."""
        least, most = self._settings.samples or (self._samples, self._samples)
        smallest = self._settings.min_batch * self.problem.cluster.ranks
        if self._settings.min_batch < 1 or most < max(least, smallest):
            message = f"no step has {least} to {most} samples, with {self._settings.min_batch} or "
            message += f"more on each of {self.problem.cluster.ranks} devices"
            do = "allow more samples, or smaller batches on a device"
            raise OptionError(message, where="batch", do=do)
        unit = math.gcd(*self._levels.counts.values())
        multiples = range(-(-max(least, smallest) // unit), most // unit + 1)
        picked = np.linspace(0, len(multiples) - 1, min(_SIZES, len(multiples))).round()
        sizes = {unit * multiples[int(index)] for index in picked}
        if least <= self._samples <= most:
            sizes.add(self._samples)
        return [size for size in sorted(sizes) if self._levels.is_possible(size)]

    # Objectives

    def minimize(self) -> float:
        """Search for the best plan by the problem's objective; return a lower bound."""
        if self.problem.least == "variance":
            return self.least_variance(self.problem.seconds)
        return self.least_seconds()

    def allow_recomputation(self) -> None:
        """Allow activation memory budgets below 1 from now on."""
        self._levels.allow_recomputation(self._settings.budgets)
        self._variances.clear()

    def evaluate_uniform_plans(self) -> None:
        """Evaluate uniform plans, with the problem's batches and in proportion to speed."""
        names = dict.fromkeys(fmt for part in self.problem.classes.values() for fmt in part.formats)
        choices: list[Callable[[Problem], Plans]] = [full]
        choices += [partial(_in_format, fmt=name) for name in names]
        tried = list[Plans]()
        for plans in choices:
            chosen = plans(self.problem)
            if chosen in tried:
                continue
            tried.append(chosen)
            # Balanced batches are usually better, and then the peaks of the others do not matter.
            if not self._settings.given_batches:
                batches = balanced_batches(self._sized, plans, self._settings.min_batch)
                self._evaluate(batches, plans(self._sized.problem(batches)))
            self._evaluate(self._before, chosen)

    def solve_equal_batches(self) -> None:
        """Evaluate the exact plan of the problem's batches, unless bounds show it is not better."""
        if self._samples not in self._sizes:
            return
        limit, batches = self._limit(self.problem.seconds, self._samples), self._before
        if self.best is not None:
            seconds, variance = limit, self.problem.variance
            if self.problem.least == "seconds":
                seconds = self.best.evaluation.seconds
            else:
                variance = self.best.evaluation.variance
            for relaxed in (True, False):
                for name, batch in batches.items():
                    self._levels.solve(name, batch, seconds, relaxed)
                bounds = (
                    self._levels.costs(name, self._samples, seconds, "lower")[batch]
                    for name, batch in batches.items()
                )
                if sum(bounds) >= (variance or 0.0):
                    return
        for problem in (without_peaks(self.problem), self.problem):
            equal = self._levels.exact(problem, _START_GAP).incumbent
            if equal is not None:
                evaluation = self._evaluate(batches, equal.plans)
                if evaluation is None or self._memory_fits(evaluation):
                    return

    def least_variance(
        self, seconds: float | None, until: float | None = None, relaxed: bool = False
    ) -> float:
        """Search for the least variance with a step of at most `seconds`; return a lower bound.

        The search also ends when it is known whether the least variance is at most `until`.
        `relaxed` searches for the bound by relaxations only, and evaluates no plans.
        """
        limits = {size: self._limit(seconds, size) for size in self._sizes}
        best = math.inf
        if self.best is not None and self.problem.least == "variance":
            best = self.best.evaluation.variance
        while True:
            bound, size, batches = math.inf, 0, {}
            for samples, limit in limits.items():
                if relaxed:
                    best = min(best, self._levels.assign(samples, limit, "relaxed")[0])
                elif proposal := self._levels.assign(samples, limit, "upper")[1]:
                    best = min(best, self._evaluate_levels(proposal, limit))
                value, chosen = self._levels.assign(samples, limit, "lower")
                if value < bound:
                    bound, size, batches = value, samples, chosen
            if bound == math.inf:
                return bound
            if until is None and best * (1 - self._settings.gap) <= bound:
                return bound
            if until is not None and (not beyond(best, until) or beyond(bound, until)):
                return bound
            pending = self._levels.pending(batches, size, limits[size], relaxed)
            self.stopped |= bool(pending) and time.monotonic() > self._levels.until
            if not pending or self.stopped:
                return bound
            for name, batch, relaxation in pending:
                self._levels.solve(name, batch, limits[size], relaxation)

    def least_seconds(self) -> float:
        """Search for the least seconds within the limit of the variance; return a lower bound.

        Relaxations give a first bound. A plan within the first limit closes half of the gap, and
        one within the next limits the gap; they grow while no plan meets them.
        """
        budget, gap = self.problem.variance, self._settings.gap
        assert budget is not None
        if self.best is None:
            self.least_variance(None, budget)
        if self.best is None:
            return 0.0
        # Limits are for the samples of a step before; all steps now have `_sizes[0]` samples.
        scale = self._sizes[0] / self._samples
        lower, share = self._relaxed_seconds(self.best.evaluation.seconds / scale, budget), gap / 2
        undecided = list[float]()
        while not self.stopped:
            upper = self.best.evaluation.seconds / scale
            if upper - lower <= gap * upper * (1 + TOLERANCE):
                break
            # Limits that programs do not decide leave a gap, but shorter ones may still be refuted.
            shortest = max([lower, *undecided])
            limit = upper * (1 - gap)
            if upper - shortest > gap * upper * (1 + TOLERANCE):
                limit = min(limit, shortest / (1 - share))
            elif limit >= min(undecided, default=0.0):
                break
            if share > gap:
                limit = min(limit, (upper + shortest) / 2)
            bound = self.least_variance(limit, budget)
            if beyond(bound, budget):
                lower = max(lower, limit)
            elif beyond(self.best.evaluation.seconds / scale, limit):
                undecided.append(limit)
            share = min(2 * share, 0.5)
        return lower * scale

    def _relaxed_seconds(self, upper: float, budget: float) -> float:
        """Return a limit of the seconds that relaxations refute, by bisection.

        Relaxations have no limit of the memory, so they hold with recomputation, too.
        """
        while upper - self._refuted > _RELAXED_GAP * upper and not self.stopped:
            limit = (self._refuted + upper) / 2
            if beyond(self.least_variance(limit, budget, relaxed=True), budget):
                self._refuted = limit
            else:
                upper = limit
        return self._refuted

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
        parts = {n: self._levels.part(n, batches[n], budget) for n, budget in budgets.items()}
        return replace(problem, classes={**problem.classes, **parts})

    def _evaluate(
        self,
        batches: Mapping[str, int],
        plans: Plans,
        budgets: Mapping[str, float] = MappingProxyType({}),
    ) -> Evaluation | None:
        """Evaluate plans, and keep them if they are the best; return None for forbidden batches.

        Peak memory is expensive, so it is missing in evaluations that cannot be the best.
        """
        least, most = self._settings.samples or (self._samples, self._samples)
        samples = self._levels.total(batches)
        if not least <= samples <= most or min(batches.values()) < self._settings.min_batch:
            return None
        problem = self._problem(batches, budgets)
        if problem.seconds is not None:
            problem = replace(problem, seconds=self._limit(problem.seconds, samples))
        plans = problem.completed(plans)
        evaluation = evaluate_plan(without_peaks(problem), plans)
        if self.best is not None and (
            evaluation.exceeds(problem)
            or self._order(evaluation) >= self._order(self.best.evaluation)
        ):
            return evaluation
        classes = {}
        for name, metrics in evaluation.classes.items():
            budget = budgets.get(name, 1.0)
            peak = self._sized.peak(name, batches[name], plans[name], budget)
            classes[name] = replace(metrics, peak_bytes=peak)
        evaluation = replace(evaluation, classes=classes)
        self.tried.append(evaluation)
        if not evaluation.exceeds(problem):
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
        levels = self._levels.plans(batches, seconds)
        if levels is None:
            return math.inf
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

    def _limit(self, seconds: float | None, samples: int) -> float:
        """Return the limit of a step with other samples, at the same throughput."""
        return math.inf if seconds is None else seconds * samples / self._samples


def _in_format(problem: Problem, fmt: str) -> Plans:
    """Return the plans with a format in all classes that have it, and the widest in the others."""
    return problem.completed(
        {
            name: part.uniform(fmt if fmt in part.formats else part.widest)
            for name, part in problem.classes.items()
            if part.fixed_plan is None
        }
    )


def _given_batches(problem: Problem) -> dict[str, int]:
    """Return the samples per device of each class; 1 for all classes if any is unknown."""
    devices = problem.cluster.devices
    batches = {name: device.batch or 1 for name, device in devices.items()}
    return batches if problem.cluster.samples is not None else dict.fromkeys(batches, 1)
