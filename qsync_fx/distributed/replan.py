"""Replanning during training, when device speed, free memory or link speed changes.

Rank 0 solves again with the profiles from before training, scaled by the measured changes, and all
ranks switch plans between the same two steps. If the plan has local batches and replanning has
their sampler, samples move first: formats change only if that gains more. Invariants: no rank waits
in a collective meanwhile; the samples of a step stay, so the learning rate stays.
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
from types import MappingProxyType
from typing import Any, Final

import cattrs
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from qsync_fx.allocator.evaluator import Evaluation, evaluate_plan
from qsync_fx.allocator.plan_result import PlanResult, PredictedCost
from qsync_fx.allocator.problem import Plans
from qsync_fx.communication.control_group import control
from qsync_fx.communication.ddp_hook import DdpCompressor, by_plan
from qsync_fx.distributed.agreement import Meeting
from qsync_fx.distributed.batch_sampler import DistributedBatchSampler
from qsync_fx.distributed.drift import (
    Clock,
    Drift,
    Hysteresis,
    LinkTimes,
    Pace,
    ProbedLinks,
    Room,
    StepWindow,
    WindowSummary,
    drift,
    wins,
)
from qsync_fx.distributed.fleet_plan import CODECS, FleetConditions, FleetPlan
from qsync_fx.distributed.memory_use import PeakCheck, free_bytes, held_bytes
from qsync_fx.distributed.sample_weighted_mean import averages_by_batch
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
    """Reason of a rank for replanning; for links, which all ranks share, the rank is -1."""

    rank: int
    device: str
    change: PlanChange
    predicted: float  # predicted seconds, or bytes that the plan needs or was solved for
    measured: float  # measured seconds, or available bytes

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.device})"
        if self.change in (PlanChange.TIGHT, PlanChange.ROOMY):
            needs = {PlanChange.TIGHT: "needs", PlanChange.ROOMY: "was made for"}[self.change]
            has, needed = short(self.measured, "B"), short(self.predicted, "B")
            return f"{who} has {has} of memory for a step, but its plan {needs} {needed}"
        text = f"{who} computes {duration(self.measured)} per step"
        if self.change is PlanChange.LINKS:
            text = f"an exchange of gradients takes {duration(self.measured)}"
        ratio = self.measured / self.predicted
        return f"{text} instead of the predicted {duration(self.predicted)} (ratio {ratio:.2f})"


@dataclass(frozen=True)
class ReplanCosts:
    """Seconds and variance of a step, operators per format by class, buckets per codec, and samples
    per step of each rank by class, if batches are planned.
    """

    seconds: float
    variance: float
    formats: Mapping[str, Mapping[str, int]]
    codecs: Mapping[str, int] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        judged: Evaluation,
        plans: Plans,
        batches: Mapping[str, int] = MappingProxyType({}),
    ) -> ReplanCosts:
        formats = {name: dict(Counter(requested.values())) for name, requested in plans.items()}
        codecs = dict(Counter(judged.codecs))
        return cls(judged.seconds, judged.variance, formats, codecs, dict(batches))

    def __str__(self) -> str:
        formats = "; ".join(f"{name}: {_counts(by)}" for name, by in self.formats.items())
        text = f"{duration(self.seconds)} per step, variance {self.variance:.4g}; {formats}"
        if self.codecs:
            text += f"; gradient buckets: {_counts(self.codecs)}"
        if self.batches:
            text += f"; samples: {', '.join(f'{n} on {name}' for name, n in self.batches.items())}"
        return text


def _counts(by: Mapping[str, int]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in sorted(by.items()))


@dataclass(frozen=True)
class ReplanReport:
    """Decision on drift; equal on all ranks."""

    step: int  # optimizer step after which it was decided
    causes: tuple[ReplanCause, ...]
    before: ReplanCosts | None  # of the previous plan under current conditions
    after: ReplanCosts | None = None  # None if the previous plan stays active
    reason: str = ""  # why the previous plan stays active
    start: tuple[int, int] | None = None  # epoch and step with the first new batches; None: no move
    formats_stay: bool = False  # whether the new plan has the previous formats and codecs

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
            text = f"the plan stays active after step {self.step}, although {why}\n"
            now = f"\n  now:    {self.before}" if self.before is not None else ""
            return f"{text}  reason: {self.reason}{now}"
        text = f"a new plan is active from step {self.step + 1}, because {why}\n"
        text += f"  before: {self.before}\n  after:  {self.after}"
        if not self.formats_stay:
            text += "\n  the model is recompiled at its next call"
        if self.start is not None:
            epoch, step = self.start
            text += f"\n  samples move from step {step} of the sampler's epoch {epoch} on; "
            text += "a model that is compiled for one batch size is recompiled once"
        return text


_LOG = logging.getLogger("qsync_fx.distributed")


@dataclass(frozen=True)
class Replanning(Hysteresis):
    """Settings for `guard(model, replan=...)`: those of `Hysteresis`, and the following.

    Attributes:
        plan: the result of `qsync_fx.distributed.measure_and_plan` that the model trains under.
        compression: the result of `compress(ddp, plan)`, required for plans with codecs.
        sampler: the `DistributedBatchSampler(dataset, plan)` of training, if the plan has local
            batches. Replanning then moves samples between ranks; without it, batches stay.
        free: returns the free bytes of this rank's device, or None if unknown; overrides the
            system's value.
        clock: in seconds; by default wall time, which includes delays by other programs.
    """

    plan: FleetPlan
    compression: DdpCompressor | None = field(default=None, kw_only=True)
    sampler: DistributedBatchSampler | None = field(default=None, kw_only=True)
    free: Callable[[], float | None] | None = field(default=None, kw_only=True)
    clock: Clock = field(default=time.perf_counter, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.plan, FleetPlan):
            raise OptionError(
                "replanning requires a FleetPlan with its measurements, not a value of type "
                f"{type(self.plan).__name__}",
                where="Replanning(plan=...)",
                do="pass the result of qsync_fx.distributed.measure_and_plan in this process",
            )
        compression = self.compression
        size, _ = nodes_noted(self.plan.notes) or (1, False)
        nodes = None if compression is None else compression.nodes
        if compression is not None and size != (1 if nodes is None else nodes.size):
            text = f"the plan assumes nodes of {size} ranks, but compression has {nodes or 'none'}"
            do = "pass the result of qsync_fx.distributed.compress(ddp, plan) for this plan"
            raise OptionError(text, where="Replanning", do=do)
        planned = compression and by_plan(self.plan.codecs, compression.names).text
        active = compression and compression.assigned.text
        if CODECS in self.plan.notes and (active is None or active != planned):
            text = "the plan has gradient codecs, but replanning has no compression that uses them"
            do = "pass the result of qsync_fx.distributed.compress(ddp, plan) for this plan"
            raise OptionError(text, where="Replanning(compression=...)", do=do)
        if self.sampler is not None and self.sampler.batches != _batches(self.plan):
            text = f"the sampler has the batch sizes {list(self.sampler.batches)}, but the plan "
            text += f"{list(_batches(self.plan)) or 'none'}"
            do = 'plan with batch="global", and pass DistributedBatchSampler(dataset, plan)'
            raise OptionError(text, where="Replanning(sampler=...)", do=do)

    @property
    def hysteresis(self) -> Hysteresis:
        """The thresholds alone, which are equal on all ranks."""
        return Hysteresis(**{item.name: getattr(self, item.name) for item in fields(Hysteresis)})


class Replanner:
    """Replanning of one training, on one rank; call `begin` and `end` around optimizer steps."""

    def __init__(
        self,
        model: nn.Module,
        settings: Replanning,
        meeting: Meeting,
        peaks: PeakCheck,
        optimizers: Callable[[], Iterable[Optimizer]],
    ) -> None:
        _check(model, settings.plan)
        if settings.plan.batches and settings.sampler is None:
            _LOG.warning(
                "the plan has local batches, but replanning has no sampler, so it changes formats "
                "only; to move samples, pass Replanning(..., sampler=...)"
            )
        self._model, self._settings, self._meeting, self._peaks = model, settings, meeting, peaks
        self._optimizers = optimizers
        self._device = next(model.parameters()).device
        self.plan, self.history = settings.plan, list[ReplanReport]()
        self._class_name = settings.plan.ranks[meeting.rank]
        self._predicted = _predicted(settings.plan)
        self._caps = {name: cost.memory for name, cost in self._predicted.items()}
        self._slowdowns = dict.fromkeys(self._predicted, 1.0)
        self._links = ProbedLinks(settings.plan.notes, settings, self._device)
        self._link_times: LinkTimes | None = None
        self._planned: dict[str, float] = {}
        self._steps, self._window = 0, StepWindow(resting=settings.patience)
        self._held_bytes: int | None = None
        self._solution: FleetPlan | None = None
        self.pace = Pace(model, settings.clock)

    def begin(self) -> None:
        self.pace.begin()

    def end(self) -> None:
        """Record the step, and compare with the other ranks after every `patience` steps."""
        seconds, predicted = self.pace.end(), self._predicted[self._class_name].computing
        patience = self._settings.patience
        if seconds is not None and predicted is not None:
            room = None if self._window.resting else self._room()
            self._window = self._window.after_step(seconds / predicted, room, patience)
        sampler = self._settings.sampler
        if self._steps == 0 and sampler is not None and not averages_by_batch(self._model):
            text = "replanning may move samples, but gradients are not weighted by samples"
            do = "call qsync_fx.distributed.average_by_batch(model) before training"
            raise OptionError(text, where="Replanning(sampler=...)", do=do)
        self._steps += 1
        if self._steps % patience == 0:
            everyones: list[Any] = [None] * self._meeting.world
            mine = self._window.summary(self._settings)
            if sampler is not None:
                mine = replace(mine, position=sampler.position)
            distributed.all_gather_object(everyones, mine, group=control())
            result, links = drift(everyones, self.plan.ranks), self._links.look()
            if links is not None:
                result = replace(result or Drift(), links=links)
            if result is not None:
                self._replan(result, everyones)

    def _room(self) -> Room | None:
        peak, cap = self._predicted[self._class_name].peak, self._caps[self._class_name] or math.inf
        get_free = self._settings.free or partial(free_bytes, self._device)
        free = get_free()
        if free is None or peak is None:
            return None
        if self._held_bytes is None:
            self._held_bytes = held_bytes(self._model, self._optimizers(), self._peaks.parallel)
        # A measured peak above the prediction reduces the available memory by the same factor.
        allowed = min(free + self._held_bytes, cap) / max(1.0, self._peaks.over or 1.0)
        return Room(allowed, peak, self._planned.get(self._class_name))

    def _replan(self, result: Drift, everyones: list[WindowSummary]) -> None:
        causes = tuple(self._causes(result, everyones))
        self._slowdowns = {
            name: old * result.paces.get(name, 1.0) for name, old in self._slowdowns.items()
        }
        if result.links is not None:
            self._links.decided(result.links)
            compression = self._settings.compression
            nodes = None if compression is None else compression.nodes
            self._link_times = self._links.times(nodes)
        requested = {self.plan.ranks[rank] for rank in (*result.tight, *result.roomy)}
        self._planned |= {name: result.allowed[name] for name in requested}
        planned = self._planned.items()
        self._planned = {n: size for n, size in planned if size < (self._caps[n] or math.inf)}
        about = f"plan after step {self._steps}"
        if self._meeting.rank == 0:
            start = max(summary.position for summary in everyones)
            self._meeting.put(about, json.dumps(self._solved(causes, start)))
        reported = json.loads(self._meeting.get(about, 0, self._meeting.compiling))
        decided = ReplanReport.from_dict(reported["replanned"])
        if reported["plan"] is None:
            for name, cost in self._predicted.items():
                computing = cost.computing and cost.computing * result.paces.get(name, 1.0)
                self._predicted[name] = replace(cost, computing=computing)
        else:
            self._switch(ClusterPlan.from_json(reported["plan"]), decided.start)
        self._links.decided(None)
        self.history.append(decided)
        self._window = StepWindow(resting=self._settings.cooldown)
        _LOG.warning("%s", decided)

    def _switch(self, plan: ClusterPlan, start: tuple[int, int] | None = None) -> None:
        self.plan, self._predicted = self._solution or FleetPlan(plan), _predicted(plan)
        switch_plan(self._model, plan)
        if (compression := self._settings.compression) is not None:
            compression.change(by_plan(plan.codecs, compression.names))
        if start is not None and self._settings.sampler is not None:
            self._settings.sampler.change(_batches(self.plan), start)
        self._peaks.follow(self._predicted[self._class_name])

    def _solved(self, causes: tuple[ReplanCause, ...], start: tuple[int, int]) -> dict[str, Any]:
        """Return the decision; `start` is the epoch and step from which batches may change."""
        survey, old = self.plan.survey, self.plan.answer
        assert survey is not None and old is not None
        limits = {name: self._planned.get(name, cap) for name, cap in self._caps.items()}
        memory = {name: size for name, size in limits.items() if size is not None}
        conditions = FleetConditions(self._slowdowns, memory, self._link_times)
        gain, before, after = self._settings.gain, None, None
        begins, formats_stay, self._solution = None, False, None
        try:
            problem = survey.problem(conditions)
            now = evaluate_plan(problem, old.plans, old.evaluation.codecs)
            before = ReplanCosts.of(now, old.plans, old.batches)
            if self._settings.sampler is None:
                answer = survey.answer(conditions)
            else:
                survey, answer = survey.move_samples(old, conditions)
                answer = _with_formats(old, answer, gain)
        except PlanError as error:
            reason = f"there is no feasible plan: {error.what}"
        else:
            new, reason = ReplanCosts.of(answer.evaluation, answer.plans, answer.batches), ""
            formats_stay = (answer.plans, answer.codecs) == (old.plans, old.codecs)
            moves = answer.batches != old.batches
            fits = not any(name.startswith("memory") for name in now.exceeds(problem))
            costs = (before.seconds, before.variance), (new.seconds, new.variance)
            if formats_stay and not moves:
                reason = "the active plan is still the best one"
            elif not wins(*costs, fits, gain):
                reason = f"the best new plan gains less than {gain:.0%} of time or variance"
            else:
                self._solution, after = FleetPlan.of(answer, survey), new
                begins = start if moves else None
        decided = ReplanReport(self._steps, causes, before, after, reason, begins, formats_stay)
        plan = self._solution and self._solution.to_json()
        return {"plan": plan, "replanned": decided.to_dict()}

    def _causes(self, result: Drift, everyones: list[WindowSummary]) -> Iterable[ReplanCause]:
        if result.links is not None and self._links.probe is not None:
            seconds = self._links.probe.seconds
            yield ReplanCause(-1, "", PlanChange.LINKS, seconds, seconds * result.links)
        for change in ("slower", "faster", "tight", "roomy"):
            for rank in getattr(result, change):
                name, summary = self.plan.ranks[rank], everyones[rank]
                before = self._predicted[name].computing
                after = (before or 0.0) * (summary.pace or 1.0)
                if change == "tight":
                    before, after = self._predicted[name].peak, summary.allowed or 0.0
                elif change == "roomy":
                    before, after = self._planned.get(name), summary.allowed or 0.0
                yield ReplanCause(rank, name, PlanChange(change), before or 0.0, after)


def _with_formats(active: PlanResult, result: PlanResult, gain: float) -> PlanResult:
    """Return a result with the formats and codecs of the active plan, unless its own gain more."""
    evaluation = evaluate_plan(result.problem, active.plans, active.evaluation.codecs)
    costs = [(item.seconds, item.variance) for item in (evaluation, result.evaluation)]
    # Formats of more seconds than allowed stay only if they are slower by less than the gain.
    allowed = evaluation.exceeds(result.problem).keys() <= {"seconds"}
    if not allowed or wins(costs[0], costs[1], fits=True, gain=gain):
        return result
    return replace(result, plans=active.plans, evaluation=evaluation, bound=None, iterations=())


def _batches(plan: ClusterPlan) -> tuple[int, ...]:
    """Return the samples per step of each rank; () if they are not planned."""
    return tuple(plan.batches[name] for name in plan.ranks if name in plan.batches)


def _predicted(plan: ClusterPlan) -> dict[str, PredictedCost]:
    return {name: PredictedCost.noted(part.notes) for name, part in plan.classes.items()}


def _check(model: nn.Module, result: FleetPlan) -> None:
    where = "guard(..., replan=...)"
    if any(isinstance(p, DTensor) for p in model.parameters()):
        text = "replanning supports DistributedDataParallel, but this model is sharded"
        raise OptionError(text, where=where, do="remove replan=...")
    digest = result.for_class(result.ranks[distributed.get_rank()]).notes[CLUSTER]
    active = {options.plan and options.plan.notes.get(CLUSTER) for options in options_of(model)}
    if active != {digest}:
        text = "the model is not compiled with the plan that replanning starts from"
        do = 'compile the model with options={"plan": found} and the same found'
        raise OptionError(text, where=where, do=do)
