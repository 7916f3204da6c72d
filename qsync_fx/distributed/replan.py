"""Replanning during training, when device speed, free memory or link speed changes.

Every `patience` steps the ranks exchange summaries of their windows, probe links if the plan has
codecs, and evaluate `drift`. On drift, rank 0 solves again with the profiles from before training,
scaled by the measured changes, and all ranks switch plans between the same two steps. No rank waits
in a collective meanwhile, so errors propagate at once.

Invariant: at every step all ranks run parts of the same plan. Optimizer, parameters and random
state do not change. An equal plan, or one that gains too little, is not switched to.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from qsync_fx.allocator.evaluator import Evaluation
from qsync_fx.allocator.plan_result import PlanResult, PredictedCost
from qsync_fx.allocator.problem import Plans
from qsync_fx.communication.control_group import control
from qsync_fx.communication.ddp_hook import DdpCompressor, by_plan
from qsync_fx.distributed.consensus.rendezvous import Meeting
from qsync_fx.distributed.fleet_plan import CODECS, FleetPlan, under
from qsync_fx.distributed.monitoring.drift import (
    Clock,
    Drift,
    Hysteresis,
    Pace,
    Room,
    Stated,
    StepWindow,
    after_step,
    drift,
    stated,
    wins,
)
from qsync_fx.distributed.monitoring.link_probe import ProbedLinks
from qsync_fx.distributed.monitoring.memory_use import PeakCheck, free_bytes, held_bytes
from qsync_fx.errors import OptionError, PlanError
from qsync_fx.formatting import duration, short
from qsync_fx.plan.cluster_plan import CLUSTER, ClusterPlan, nodes_noted
from qsync_fx.plan_switching import options_of, switch_plan


class PlanChange(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"
    TIGHT = "tight"
    ROOMY = "roomy"
    LINKS = "links"


@dataclass(frozen=True)
class ReplanCause:
    """Reason of a rank for replanning.

    Attributes:
        rank, device: the rank and its device class; -1 and "" for links, which all ranks share.
        change: kind of change.
        foreseen, measured: predicted and measured compute seconds of a step, or seconds of an
            all-reduce. For memory: bytes that the plan needs or was solved for, and bytes that are
            available.
    """

    rank: int
    device: str
    change: PlanChange
    foreseen: float
    measured: float


@dataclass(frozen=True)
class ReplanCosts:
    """Costs of plans.

    Attributes:
        seconds: of a step.
        variance: of the gradients.
        formats: by class, number of operators that request each format.
        codecs: number of gradient buckets per codec; empty if the plan has no codecs.
    """

    seconds: float
    variance: float
    formats: Mapping[str, Mapping[str, int]]
    codecs: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, judged: Evaluation, plans: Plans) -> ReplanCosts:
        formats = {name: dict(Counter(requested.values())) for name, requested in plans.items()}
        return cls(judged.seconds, judged.variance, formats, dict(Counter(judged.codecs)))


@dataclass(frozen=True)
class ReplanReport:
    """Decision on drift; equal on all ranks.

    Attributes:
        step: optimizer step after which it was decided.
        causes: reasons for replanning.
        before: costs of the previous plan under current conditions; None if not evaluated.
        after: costs of the new plan; None if the previous plan stays active.
        kept: why the previous plan stays active; "" if it does not.
    """

    step: int
    causes: tuple[ReplanCause, ...]
    before: ReplanCosts | None
    after: ReplanCosts | None = None
    kept: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, result: Mapping[str, Any]) -> ReplanReport:
        causes = tuple(
            ReplanCause(**{**cause, "change": PlanChange(cause["change"])})
            for cause in result["causes"]
        )
        before, after = (
            None if result[name] is None else ReplanCosts(**result[name])
            for name in ("before", "after")
        )
        return cls(result["step"], causes, before, after, result["kept"])

    def __str__(self) -> str:
        why = _listed(_why(cause) for cause in self.causes)
        if self.after is None:
            lines = [
                f"the plan stays active after step {self.step}, although {why}",
                f"  reason: {self.kept}",
            ]
            return "\n".join(
                lines + ([] if self.before is None else [f"  now:    {_costs(self.before)}"])
            )
        lines = [f"a new plan is active from step {self.step + 1}, because {why}"]
        lines += [] if self.before is None else [f"  before: {_costs(self.before)}"]
        return "\n".join(
            [
                *lines,
                f"  after:  {_costs(self.after)}",
                "  the model is recompiled at its next call",
            ]
        )


def _why(cause: ReplanCause) -> str:
    if cause.change is PlanChange.LINKS:
        return (
            f"an all-reduce takes {duration(cause.measured)} instead of the predicted "
            f"{duration(cause.foreseen)} (ratio {cause.measured / cause.foreseen:.2f})"
        )
    who = f"rank {cause.rank} ({cause.device})"
    if cause.change in (PlanChange.SLOWER, PlanChange.FASTER):
        return (
            f"{who} computes {duration(cause.measured)} per step instead of the predicted "
            f"{duration(cause.foreseen)} (ratio {cause.measured / cause.foreseen:.2f})"
        )
    message = "its plan needs" if cause.change is PlanChange.TIGHT else "its plan was made for"
    return (
        f"{who} has {short(cause.measured, 'B')} of memory for a step, but {message} "
        f"{short(cause.foreseen, 'B')}"
    )


def _costs(costs: ReplanCosts) -> str:
    formats = "; ".join(
        f"{name}: {', '.join(f'{count} in {fmt}' for fmt, count in sorted(item.items()))}"
        for name, item in costs.formats.items()
    )
    buckets = ", ".join(f"{count} in {codec}" for codec, count in sorted(costs.codecs.items()))
    sent = f"; gradient buckets: {buckets}" if buckets else ""
    return f"{duration(costs.seconds)} per step, variance {costs.variance:.4g}; {formats}{sent}"


def _listed(texts: Any) -> str:
    result: Sequence[str] = list(texts)
    return "; ".join(result[:3]) + (
        f"; and {len(result) - 3} more causes" if len(result) > 3 else ""
    )


_LOG = logging.getLogger("qsync_fx.distributed")
_EQUAL: Final = "the active plan is still the best one"


@dataclass(frozen=True)
class Replanning:
    """Settings for `guard(model, replan=...)`.

    Attributes:
        found: the result of `qsync_fx.distributed.measure_and_plan` that the model trains under.
        tolerance: relative deviation of compute seconds or memory from the prediction.
        patience: consecutive steps that must exceed it.
        cooldown: steps after a decision that are ignored.
        gain: relative improvement of time or variance that another plan must reach.
        links: relative deviation of an all-reduce from the prediction, in two consecutive probes
            that are `patience` steps apart; for plans with codecs.
        compression: the result of `compress(ddp, found)`, required for plans with codecs, because
            another plan may have other codecs.
        free: returns the free bytes of this rank's device, or None if unknown; overrides the
            system's value.
        clock: in seconds; by default wall time, which includes delays by other programs.
    """

    found: FleetPlan
    tolerance: float = 0.15
    patience: int = 20
    cooldown: int = 100
    gain: float = 0.02
    links: float = 0.5
    compression: DdpCompressor | None = None
    free: Callable[[], float | None] | None = None
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        if not isinstance(self.found, FleetPlan):
            raise OptionError(
                f"replanning requires a FleetPlan with its measurements, not a value of type "
                f"{type(self.found).__name__}",
                where="Replanning(found=...)",
                do="pass the result of qsync_fx.distributed.measure_and_plan in this process",
            )
        sent = None if self.compression is None else self.compression.nodes
        if nodes_noted(self.found.notes) is not None or sent is not None:
            raise OptionError(
                "codecs between nodes cannot change during training",
                where="Replanning",
                do="pass hierarchical=False to measure_and_plan and compress, plan without codecs, "
                "or train without replanning",
            )
        if CODECS in self.found.notes and not _sends(self.compression, self.found):
            raise OptionError(
                "the plan has gradient codecs, but replanning has no compression that uses them",
                where="Replanning(compression=...)",
                do="pass the result of qsync_fx.distributed.compress(ddp, found) for this plan",
            )
        self.hysteresis  # noqa: B018 - raises for invalid values

    @property
    def hysteresis(self) -> Hysteresis:
        return Hysteresis(self.tolerance, self.patience, self.cooldown, self.gain, self.links)


class Replanner:
    """Replanning of one training, on one rank; call `begin` and `end` around optimizer steps.

    Attributes:
        found: the active plan.
        history: decisions so far.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Replanning,
        meeting: Meeting,
        peaks: PeakCheck,
        optimizers: Callable[[], Iterable[Optimizer]],
    ) -> None:
        _check(model, settings.found)
        self._model, self._how, self._meeting, self._peaks = model, settings, meeting, peaks
        self._optimizers, self._hysteresis = optimizers, settings.hysteresis
        self._device = next(model.parameters()).device
        self.found, self.history = settings.found, list[ReplanReport]()
        self._own = settings.found.ranks[meeting.rank]
        self._foreseen = {
            name: PredictedCost.noted(plan.notes) for name, plan in settings.found.classes.items()
        }
        self._caps = {name: foreseen.memory for name, foreseen in self._foreseen.items()}
        self._slowdowns = dict.fromkeys(self._foreseen, 1.0)
        self._links = ProbedLinks(settings.found.notes, self._hysteresis, self._device)
        self._all_reduces = list[tuple[int, float]]()
        self._planned: dict[str, float] = {}
        self._steps, self._seen = 0, StepWindow(resting=settings.patience)
        self._held: int | None = None
        self._solution: FleetPlan | None = None
        self.pace = Pace(model, settings.clock)

    def begin(self) -> None:
        self.pace.begin()

    def end(self) -> None:
        """Record the step, and compare with the other ranks after every `patience` steps."""
        seconds, foreseen = self.pace.end(), self._foreseen[self._own].computing
        if seconds is not None and foreseen is not None:
            room = None if self._seen.resting else self._room()
            self._seen = after_step(self._seen, seconds / foreseen, room, self._hysteresis)
        self._steps += 1
        if self._steps % self._how.patience == 0:
            everyones = self._exchanged(stated(self._seen, self._hysteresis))
            result, links = drift(everyones, self.found.ranks), self._links.look()
            if links is not None:
                result = replace(result or Drift(), links=links)
            if result is not None:
                self._replan(result, everyones)

    def _room(self) -> Room | None:
        foreseen, cap = self._foreseen[self._own], self._caps[self._own]
        free = free_bytes(self._device) if self._how.free is None else self._how.free()
        if free is None or foreseen.peak is None:
            return None
        if self._held is None:
            self._held = held_bytes(self._model, self._optimizers(), self._peaks.parallel)
        allowed = free + self._held
        allowed = allowed if cap is None else min(allowed, cap)
        # A measured peak above the prediction reduces the available memory by the same factor.
        return Room(
            allowed / max(1.0, self._peaks.over or 1.0), foreseen.peak, self._planned.get(self._own)
        )

    def _exchanged(self, mine: Stated) -> list[Stated]:
        numbers = [math.nan if value is None else float(value) for value in vars(mine).values()]
        owned = torch.tensor(numbers, dtype=torch.float64)
        everyones = [torch.empty_like(owned) for _ in range(self._meeting.world)]
        distributed.all_gather(everyones, owned, group=control())
        return [_stated(item.tolist()) for item in everyones]

    def _replan(self, result: Drift, everyones: list[Stated]) -> None:
        causes = tuple(self._causes(result, everyones))
        self._slowdowns = {
            name: old * result.paces.get(name, 1.0) for name, old in self._slowdowns.items()
        }
        if result.links is not None:
            self._links.decided(result.links)
            self._all_reduces = self._links.table()
        requested = {self.found.ranks[rank] for rank in (*result.tight, *result.roomy)}
        self._planned |= {name: result.allowed[name] for name in requested}
        self._planned = {
            name: size for name, size in self._planned.items() if size < (self._caps[name] or math.inf)
        }  # fmt: skip
        about = f"plan after step {self._steps}"
        if self._meeting.rank == 0:
            self._meeting.put(about, json.dumps(self._solved(causes)))
        reported = json.loads(self._meeting.get(about, 0, self._meeting.compiling))
        decided = ReplanReport.from_dict(reported["replanned"])
        if reported["plan"] is None:
            self._foreseen = {
                name: replace(
                    item, computing=item.computing and item.computing * result.paces.get(name, 1.0)
                )
                for name, item in self._foreseen.items()
            }
        else:
            self._switch(ClusterPlan.from_json(reported["plan"]))
        self._links.decided(None)
        self.history.append(decided)
        self._seen = StepWindow(resting=self._hysteresis.cooldown)
        _LOG.warning("%s", decided)

    def _switch(self, plan: ClusterPlan) -> None:
        self.found = self._solution if self._solution is not None else FleetPlan(plan)
        self._foreseen = {
            name: PredictedCost.noted(part.notes) for name, part in plan.classes.items()
        }
        switch_plan(self._model, plan)
        if self._how.compression is not None:
            self._how.compression.change(by_plan(plan.codecs, self._how.compression.names))
        self._peaks.follow(self._foreseen[self._own])

    def _solved(self, causes: tuple[ReplanCause, ...]) -> dict[str, Any]:
        """Return rank 0's decision and the plan to switch to, as a JSON-compatible dict."""
        survey, old = self.found.survey, self.found.answer
        assert survey is not None and old is not None
        memory = {
            name: size
            for name, cap in self._caps.items()
            if (size := self._planned.get(name, cap)) is not None
        }
        try:
            answer = survey.answer(self._slowdowns, memory, self._all_reduces)
        except PlanError as error:
            saved = f"there is no feasible plan: {error.what}"
            return {
                "plan": None,
                "replanned": ReplanReport(self._steps, causes, None, kept=saved).to_dict(),
            }
        now = under(old, answer)
        before, after = (
            ReplanCosts.of(now, old.plans),
            ReplanCosts.of(answer.evaluation, answer.plans),
        )
        saved = self._kept(old, answer, before, after, not _over(now.exceeds(answer.problem)))
        self._solution = None if saved else FleetPlan.of(answer, survey)
        text = None if self._solution is None else self._solution.to_json()
        decided = ReplanReport(self._steps, causes, before, None if saved else after, saved)
        return {"plan": text, "replanned": decided.to_dict()}

    def _kept(
        self, old: PlanResult, new: PlanResult, before: ReplanCosts, after: ReplanCosts, fits: bool
    ) -> str:
        """Return why the active plan stays; "" if the new plan replaces it."""
        if new.plans == old.plans and new.codecs == old.codecs:
            return _EQUAL
        costs = (before.seconds, before.variance), (after.seconds, after.variance)
        if wins(*costs, fits, self._how.gain):
            return ""
        return f"the best new plan gains less than {self._how.gain:.0%} of time or variance"

    def _causes(self, result: Drift, everyones: list[Stated]) -> Iterable[ReplanCause]:
        if result.links is not None and self._links.probe is not None:
            seconds = self._links.probe.seconds
            yield ReplanCause(-1, "", PlanChange.LINKS, seconds, seconds * result.links)
        for change in (change for change in PlanChange if change is not PlanChange.LINKS):
            for rank in getattr(result, change.value):
                name, text = self.found.ranks[rank], everyones[rank]
                foreseen = self._foreseen[name]
                if change in (PlanChange.SLOWER, PlanChange.FASTER):
                    seconds = foreseen.computing or 0.0
                    yield ReplanCause(rank, name, change, seconds, seconds * (text.pace or 1.0))
                else:
                    size = foreseen.peak if change is PlanChange.TIGHT else self._planned.get(name)
                    yield ReplanCause(rank, name, change, size or 0.0, text.allowed or 0.0)


def _check(model: nn.Module, result: FleetPlan) -> None:
    """Raise `OptionError` if the model does not train under the plan, or is sharded."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise OptionError(
            "replanning supports DistributedDataParallel, but this model is sharded",
            where="guard(..., replan=...)",
            do="remove replan=...",
        )
    digest = result.for_class(result.ranks[distributed.get_rank()]).notes[CLUSTER]
    in_force = {
        None if options.plan is None else options.plan.notes.get(CLUSTER)
        for options in options_of(model)
    }
    if in_force != {digest}:
        raise OptionError(
            "the model is not compiled with the plan that replanning starts from",
            where="guard(..., replan=...)",
            do='compile the model with torch.compile(model, backend="qsync", options={"plan": '
            "found}) and the same found",
        )


def _sends(compression: DdpCompressor | None, result: FleetPlan) -> bool:
    return (
        compression is not None
        and compression.assigned.text == by_plan(result.codecs, compression.names).text
    )


def _over(exceeded: Mapping[str, float]) -> bool:
    return any(subject.startswith("memory") for subject in exceeded)


def _stated(numbers: list[float]) -> Stated:
    pace, slower, faster, allowed, tight, roomy = numbers
    return Stated(
        None if math.isnan(pace) else pace,
        bool(slower),
        bool(faster),
        None if math.isnan(allowed) else allowed,
        bool(tight),
        bool(roomy),
    )
