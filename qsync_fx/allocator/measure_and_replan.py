"""Measure-and-replan loop: run the plan, correct the profile, plan again.

The loop ends after a maximum number of rounds, when predicted and measured seconds agree, or when
planning returns a plan that has run already. If the rounds are exhausted, the result is the best of
the plans that ran, with their measured costs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from qsync_fx.allocator.evaluator import PlanEvaluator, evaluate_plan
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult, Trial
from qsync_fx.allocator.problem import Plans
from qsync_fx.devices.machine import here_for
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.profiler.measurement import GivenOptimizer, measure
from qsync_fx.profiler.profile import Profile, anchors
from qsync_fx.profiler.timing.step_timers import StepFunction
from qsync_fx.timeline.device_profiles import DeviceInputs

MAX_REPLANS: Final = 3
TURNS: Final = 3

Solve = Callable[[Mapping[str, DeviceInputs]], PlanResult]
"""Planner: from the profiles of all device classes to the best plan."""


@dataclass(frozen=True)
class LocalModel:
    """Local training setup that runs a plan with the arguments of `qsync_fx.measure`.

    All steps have the same `batch`; `turns` is the number of interleaved runs of a plan.
    """

    model: nn.Module
    step: StepFunction
    batch: Any
    optimizer: GivenOptimizer | None = None
    options: Mapping[str, object] | None = None
    turns: int = TURNS
    progress: bool = True

    def corrected(self, profile: Profile, answer: PlanResult, name: str) -> Profile:
        """Return the profile of a class, corrected by a run of its plan."""
        return measure(
            self.model,
            self.step,
            [self.batch],
            optimizer=self.optimizer,
            plan=answer.plan(name),
            profile=profile,
            repeats=self.turns,
            options=self.options,
            progress=self.progress,
        )


def check_max_replans(limit: int) -> None:
    """Raise `OptionError` for an invalid number of rounds."""
    if limit < 0:
        message = f"a plan cannot be run in {limit} rounds"
        raise OptionError(message, where="max_replans", do="give 0 or more")


class ReplanLoop:
    """State of the loop: `answer` is the plan to run next, or the final result if not `more`."""

    def __init__(self, answer: PlanResult, solve: Solve, limit: int) -> None:
        check_max_replans(limit)
        self.answer, self.more = answer, limit > 0
        self._solve, self._limit = solve, limit
        self._tried: list[Plans] = []
        self._ran: list[Mapping[str, Profile]] = []
        self._trials: list[tuple[Trial, ...]] = []

    def learn(
        self,
        available: Mapping[str, DeviceInputs],
        before: Mapping[str, Profile],
        after: Mapping[str, Profile],
    ) -> None:
        """Process the corrected profiles after the measurement of the current plan."""
        ran = _as_it_ran(self.answer, self.answer.plans, after)
        trials = tuple(_trial(self.answer, name, before[name], after[name], ran) for name in after)
        self._trials.append(trials)
        self._tried.append(self.answer.plans)
        self._ran.append({name: _alone(profile) for name, profile in after.items()})
        if all(trial.agrees for trial in trials) and not _held_too_much(ran, after):
            self._take(self.answer, after)
            return
        again = self._solve(available)
        if again.plans in self._tried:
            self._take(again, after)
        elif len(self._trials) == self._limit:
            self._take(self._best(again), after, (PlanNote(PlanNoteKind.UNSETTLED),))
        else:
            self.answer = again

    def _best(self, again: PlanResult) -> PlanResult:
        """Return the best plan that ran within the limits, by its measured costs; else `again`."""
        ran = [
            _as_it_ran(again, plans, profiles)
            for plans, profiles in zip(self._tried, self._ran, strict=True)
        ]
        return min((item for item in ran if item.fits), key=lambda item: item.value, default=again)

    def _take(
        self, answer: PlanResult, profiles: Mapping[str, Profile], notes: tuple[PlanNote, ...] = ()
    ) -> None:
        self.more = False
        self.answer = replace(
            answer,
            trials=tuple(self._trials),
            ran=self._tried.index(answer.plans) + 1 if answer.plans in self._tried else None,
            profiles=dict(profiles),
            notes=(*answer.notes, *notes),
        )


def settled(
    answer: PlanResult,
    available: Mapping[str, DeviceInputs],
    solve: Solve,
    at_hand: LocalModel,
    limit: int = MAX_REPLANS,
) -> PlanResult:
    """Return the result after runs of its plans on the local devices.

    Raises `ProfileError` if no profile is of this machine, or one is of another model.
    """
    rounds = ReplanLoop(answer, solve, limit)
    mine: dict[str, Profile] = {
        name: item
        for name, item in available.items()
        if isinstance(item, Profile) and item.machine == here_for(item.machine)
    }
    if not mine:
        names = ", ".join(available)
        message = f"no profile is of this machine, on which the plan is to run: {names}"
        raise ProfileError(message, where="profiles", do="leave the model out, or measure it here")
    while rounds.more:
        after = {
            name: at_hand.corrected(profile, rounds.answer, name) for name, profile in mine.items()
        }
        available = {**available, **after}
        rounds.learn(available, mine, after)
        mine = after
    return rounds.answer


def _held_too_much(ran: PlanResult, names: Iterable[str]) -> bool:
    """Return whether a measured run exceeded the memory limit of a class in `names`."""
    exceeded = ran.evaluation.exceeds(ran.problem)
    return any(f"memory {name}" in exceeded for name in names)


def _trial(
    answer: PlanResult, name: str, before: Profile, after: Profile, ran: PlanResult
) -> Trial:
    """Return predicted and measured costs of a plan on a class; `ran` is the result as measured."""
    run, slowdown = after.runs[-1], answer.problem.cluster.devices[name].slowdown
    optimizer, more_bytes = 0.0, 0
    if after.optimizer:
        optimizer = statistics.median(step[2] for step in run.steps)
    predicted, live = (item.evaluation.classes[name].peak_bytes for item in (answer, ran))
    if predicted is not None and live is not None:
        more_bytes = live - predicted
    seconds = PlanEvaluator(answer.problem, answer.plans).computing(name) / slowdown
    interpolated = len(before.interpolated(answer.plan(name)))
    return Trial(name, seconds, run.passes + optimizer, run.spread, interpolated, more_bytes)


def _alone(profile: Profile) -> Profile:
    """Return the profile with its last run as its only planned run; predictions then match it."""
    unplanned = [run for run in profile.runs[:-1] if not run.planned]
    return replace(profile, runs=unplanned + profile.runs[-1:])


def _as_it_ran(again: PlanResult, plans: Plans, ran: Mapping[str, Profile]) -> PlanResult:
    """Return the result for plans with the times and peaks of their own measured runs.

    A variance bound over all plans stays valid, unless these plans are below it: they may have run
    faster than predicted for the bound.
    """
    owned = {
        name: replace(
            again.problem.classes[name],
            times=profile.times(),
            anchors=tuple(anchors(profile, planned=True)),
        )
        for name, profile in ran.items()
    }
    problem = replace(again.problem, classes={**again.problem.classes, **owned})
    result = evaluate_plan(problem, plans, again.evaluation.codecs)
    bound = again.bound
    if problem.least != "variance" or (bound is not None and bound > result.variance):
        bound = None
    return replace(
        again, problem=problem, plans=plans, evaluation=result, bound=bound, iterations=()
    )
