"""Replanning during training, when device speed, free memory or link speed changes.

Every `patience` steps the ranks exchange summaries of their windows, probe links if the plan has
codecs, and evaluate `drift`. On drift, rank 0 solves again with the profiles from before training,
scaled by the measured changes, and all ranks switch plans between the same two steps. Invariant:
at every step all ranks run parts of the same plan, and no rank waits in a collective meanwhile.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

import cattrs
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
    StepWindow,
    WindowSummary,
    drift,
    wins,
)
from qsync_fx.distributed.monitoring.link_probe import ProbedLinks
from qsync_fx.distributed.monitoring.memory_use import PeakCheck, free_bytes, held_bytes
from qsync_fx.errors import OptionError, PlanError
from qsync_fx.formatting import duration, short
from qsync_fx.plan.cluster_plan import CLUSTER, ClusterPlan, nodes_noted
from qsync_fx.plan_switching import options_of, switch_plan

_SHOWN: Final = 3


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
        foreseen, measured: predicted and measured compute seconds of a step, or seconds of an
            all-reduce. For memory: bytes that the plan needs or was solved for, and bytes that are
            available.
    """

    rank: int
    device: str
    change: PlanChange
    foreseen: float
    measured: float

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.device})"
        if self.change in (PlanChange.TIGHT, PlanChange.ROOMY):
            needs = "needs" if self.change is PlanChange.TIGHT else "was made for"
            return (
                f"{who} has {short(self.measured, 'B')} of memory for a step, but its plan {needs} "
                f"{short(self.foreseen, 'B')}"
            )
        ratio = f"(ratio {self.measured / self.foreseen:.2f})"
        seconds = f"{duration(self.foreseen)} {ratio}"
        if self.change is PlanChange.LINKS:
            return (
                f"an all-reduce takes {duration(self.measured)} instead of the predicted {seconds}"
            )
        return (
            f"{who} computes {duration(self.measured)} per step instead of the predicted {seconds}"
        )


@dataclass(frozen=True)
class ReplanCosts:
    """Costs of plans.

    Attributes:
        seconds: of a step.
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

    def __str__(self) -> str:
        formats = "; ".join(f"{name}: {_counts(by)}" for name, by in self.formats.items())
        text = f"{duration(self.seconds)} per step, variance {self.variance:.4g}; {formats}"
        return f"{text}; gradient buckets: {_counts(self.codecs)}" if self.codecs else text


def _counts(by: Mapping[str, int]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in sorted(by.items()))


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
        return cattrs.structure(result, cls)

    def __str__(self) -> str:
        why = "; ".join(map(str, self.causes[:_SHOWN]))
        if (more := len(self.causes) - _SHOWN) > 0:
            why += f"; and {more} more causes"
        if self.after is None:
            lines = [f"the plan stays active after step {self.step}, although {why}"]
            lines.append(f"  reason: {self.kept}")
            if self.before is not None:
                lines.append(f"  now:    {self.before}")
            return "\n".join(lines)
        lines = [f"a new plan is active from step {self.step + 1}, because {why}"]
        if self.before is not None:
            lines.append(f"  before: {self.before}")
        return "\n".join(
            [*lines, f"  after:  {self.after}", "  the model is recompiled at its next call"]
        )


_LOG = logging.getLogger("qsync_fx.distributed")


@dataclass(frozen=True)
class Replanning(Hysteresis):
    """Settings for `guard(model, replan=...)`: those of `Hysteresis`, and the following.

    Attributes:
        found: the result of `qsync_fx.distributed.measure_and_plan` that the model trains under.
        compression: the result of `compress(ddp, found)`, required for plans with codecs, because
            another plan may have other codecs.
        free: returns the free bytes of this rank's device, or None if unknown; overrides the
            system's value.
        clock: in seconds; by default wall time, which includes delays by other programs.
    """

    found: FleetPlan
    compression: DdpCompressor | None = field(default=None, kw_only=True)
    free: Callable[[], float | None] | None = field(default=None, kw_only=True)
    clock: Clock = field(default=time.perf_counter, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.found, FleetPlan):
            raise OptionError(
                f"replanning requires a FleetPlan with its measurements, not a value of type "
                f"{type(self.found).__name__}",
                where="Replanning(found=...)",
                do="pass the result of qsync_fx.distributed.measure_and_plan in this process",
            )
        has_nodes = self.compression is not None and self.compression.nodes is not None
        if nodes_noted(self.found.notes) is not None or has_nodes:
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

    @property
    def hysteresis(self) -> Hysteresis:
        """The thresholds alone, which are equal on all ranks."""
        return Hysteresis(**{item.name: getattr(self, item.name) for item in fields(Hysteresis)})


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
        self._model, self._settings, self._meeting, self._peaks = model, settings, meeting, peaks
        self._optimizers = optimizers
        self._device = next(model.parameters()).device
        self.found, self.history = settings.found, list[ReplanReport]()
        self._own = settings.found.ranks[meeting.rank]
        self._predicted = _predicted(settings.found)
        self._caps = {name: cost.memory for name, cost in self._predicted.items()}
        self._slowdowns = dict.fromkeys(self._predicted, 1.0)
        self._links = ProbedLinks(settings.found.notes, settings, self._device)
        self._all_reduces = list[tuple[int, float]]()
        self._planned: dict[str, float] = {}
        self._steps, self._window = 0, StepWindow(resting=settings.patience)
        self._held: int | None = None
        self._solution: FleetPlan | None = None
        self.pace = Pace(model, settings.clock)

    def begin(self) -> None:
        self.pace.begin()

    def end(self) -> None:
        """Record the step, and compare with the other ranks after every `patience` steps."""
        seconds, predicted = self.pace.end(), self._predicted[self._own].computing
        patience = self._settings.patience
        if seconds is not None and predicted is not None:
            room = None if self._window.resting else self._room()
            self._window = self._window.after_step(seconds / predicted, room, patience)
        self._steps += 1
        if self._steps % patience == 0:
            everyones = self._exchanged(self._window.summary(self._settings))
            result, links = drift(everyones, self.found.ranks), self._links.look()
            if links is not None:
                result = replace(result or Drift(), links=links)
            if result is not None:
                self._replan(result, everyones)

    def _room(self) -> Room | None:
        peak, cap = self._predicted[self._own].peak, self._caps[self._own] or math.inf
        get_free = self._settings.free or partial(free_bytes, self._device)
        free = get_free()
        if free is None or peak is None:
            return None
        if self._held is None:
            self._held = held_bytes(self._model, self._optimizers(), self._peaks.parallel)
        # A measured peak above the prediction reduces the available memory by the same factor.
        allowed = min(free + self._held, cap) / max(1.0, self._peaks.over or 1.0)
        return Room(allowed, peak, self._planned.get(self._own))

    def _exchanged(self, mine: WindowSummary) -> list[WindowSummary]:
        everyones: list[Any] = [None] * self._meeting.world
        distributed.all_gather_object(everyones, mine, group=control())
        return everyones

    def _replan(self, result: Drift, everyones: list[WindowSummary]) -> None:
        causes = tuple(self._causes(result, everyones))
        self._slowdowns = {
            name: old * result.paces.get(name, 1.0) for name, old in self._slowdowns.items()
        }
        if result.links is not None:
            self._links.decided(result.links)
            self._all_reduces = self._links.table()
        requested = {self.found.ranks[rank] for rank in (*result.tight, *result.roomy)}
        self._planned |= {name: result.allowed[name] for name in requested}
        for name in [*self._planned]:
            if self._planned[name] >= (self._caps[name] or math.inf):
                del self._planned[name]
        about = f"plan after step {self._steps}"
        if self._meeting.rank == 0:
            self._meeting.put(about, json.dumps(self._solved(causes)))
        reported = json.loads(self._meeting.get(about, 0, self._meeting.compiling))
        decided = ReplanReport.from_dict(reported["replanned"])
        if reported["plan"] is None:
            for name, cost in self._predicted.items():
                computing = cost.computing and cost.computing * result.paces.get(name, 1.0)
                self._predicted[name] = replace(cost, computing=computing)
        else:
            self._switch(ClusterPlan.from_json(reported["plan"]))
        self._links.decided(None)
        self.history.append(decided)
        self._window = StepWindow(resting=self._settings.cooldown)
        _LOG.warning("%s", decided)

    def _switch(self, plan: ClusterPlan) -> None:
        self.found = self._solution or FleetPlan(plan)
        self._predicted = _predicted(plan)
        switch_plan(self._model, plan)
        if (compression := self._settings.compression) is not None:
            compression.change(by_plan(plan.codecs, compression.names))
        self._peaks.follow(self._predicted[self._own])

    def _solved(self, causes: tuple[ReplanCause, ...]) -> dict[str, Any]:
        """Return rank 0's decision and the plan to switch to, as a JSON-compatible dict."""
        survey, old = self.found.survey, self.found.answer
        assert survey is not None and old is not None
        limits = {name: self._planned.get(name, cap) for name, cap in self._caps.items()}
        memory = {name: size for name, size in limits.items() if size is not None}
        self._solution, before, after = None, None, None
        try:
            answer = survey.answer(self._slowdowns, memory, self._all_reduces)
        except PlanError as error:
            reason = f"there is no feasible plan: {error.what}"
        else:
            now = under(old, answer)
            fits = not any(name.startswith("memory") for name in now.exceeds(answer.problem))
            before = ReplanCosts.of(now, old.plans)
            after = ReplanCosts.of(answer.evaluation, answer.plans)
            reason = self._why_kept(old, answer, before, after, fits)
            if reason:
                after = None
            else:
                self._solution = FleetPlan.of(answer, survey)
        decided = ReplanReport(self._steps, causes, before, after, reason)
        plan = self._solution and self._solution.to_json()
        return {"plan": plan, "replanned": decided.to_dict()}

    def _why_kept(
        self, old: PlanResult, new: PlanResult, before: ReplanCosts, after: ReplanCosts, fits: bool
    ) -> str:
        """Return why the active plan stays; "" if the new plan replaces it."""
        if new.plans == old.plans and new.codecs == old.codecs:
            return "the active plan is still the best one"
        gain = self._settings.gain
        if wins((before.seconds, before.variance), (after.seconds, after.variance), fits, gain):
            return ""
        return f"the best new plan gains less than {gain:.0%} of time or variance"

    def _causes(self, result: Drift, everyones: list[WindowSummary]) -> Iterable[ReplanCause]:
        if result.links is not None and self._links.probe is not None:
            seconds = self._links.probe.seconds
            yield ReplanCause(-1, "", PlanChange.LINKS, seconds, seconds * result.links)
        for change in PlanChange:
            for rank in getattr(result, change.value) if change is not PlanChange.LINKS else ():
                name, summary = self.found.ranks[rank], everyones[rank]
                predicted = self._predicted[name]
                seconds = predicted.computing or 0.0
                before, after = {
                    PlanChange.SLOWER: (seconds, seconds * (summary.pace or 1.0)),
                    PlanChange.FASTER: (seconds, seconds * (summary.pace or 1.0)),
                    PlanChange.TIGHT: (predicted.peak, summary.allowed),
                    PlanChange.ROOMY: (self._planned.get(name), summary.allowed),
                }[change]
                yield ReplanCause(rank, name, change, before or 0.0, after or 0.0)


def _predicted(plan: ClusterPlan) -> dict[str, PredictedCost]:
    return {name: PredictedCost.noted(part.notes) for name, part in plan.classes.items()}


def _check(model: nn.Module, result: FleetPlan) -> None:
    """Raise `OptionError` if the model does not train under the plan, or is sharded."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise OptionError(
            "replanning supports DistributedDataParallel, but this model is sharded",
            where="guard(..., replan=...)",
            do="remove replan=...",
        )
    digest = result.for_class(result.ranks[distributed.get_rank()]).notes[CLUSTER]
    active = {options.plan and options.plan.notes.get(CLUSTER) for options in options_of(model)}
    if active != {digest}:
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
