"""Another plan in the middle of training, when a device's speed or its free memory has changed.

Each rank compares, step by step, what it computes itself with what the plan foresees. Every `patience` steps the ranks tell each other,
look what links take, where there are codecs to choose from, and all of them decide the same by `drift`. Then rank 0 solves anew, with the
profiles that were measured before training, scaled by what was seen, and with the memory that is there; all switch between the same two
steps. No collective waits meanwhile, so that an error is told at once.

Invariant: all ranks are under parts of one plan at every step. The optimizer, parameters and random numbers are left alone, and a plan that
is equal, or wins too little, is not switched to.

That the ranks have planned anew, with numbers: why, what a step took before and takes after.

Invariant: a value, the same on all ranks; what is said of it is made from it.
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
    """What a rank asks for another plan for.

    Attributes:
        rank, device: whose it is, and the class of its device; of links -1 and "", as they are those of all.
        change: of what.
        foreseen, measured: seconds that it computes in a step, or that an all-reduce takes; or bytes that the plan takes or was made for,
            and those that it may take.
    """

    rank: int
    device: str
    change: PlanChange
    foreseen: float
    measured: float


@dataclass(frozen=True)
class ReplanCosts:
    """What plans cost.

    Attributes:
        seconds: of a step.
        variance: of the gradients.
        formats: of each class, how many operators are asked for in each format.
        codecs: how many buckets of gradients go in each codec; nothing where there was nothing to choose.
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
    """
    Attributes:
        step: after which step of the optimizer.
        causes: why.
        before: of the plan that was in force, as devices are now; None where it could not be judged.
        after: of the plan that is in force now; None where that is the one before.
        kept: why the plan before is kept; "" where it is not.
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
                f"the plan is kept after step {self.step}, though {why}",
                f"  why:    {self.kept}",
            ]
            return "\n".join(
                lines + ([] if self.before is None else [f"  now:    {_costs(self.before)}"])
            )
        lines = [f"another plan is in force from step {self.step + 1} on, since {why}"]
        lines += [] if self.before is None else [f"  before: {_costs(self.before)}"]
        return "\n".join(
            [
                *lines,
                f"  after:  {_costs(self.after)}",
                "  the model is compiled once for it, as it is called next",
            ]
        )


def _why(cause: ReplanCause) -> str:
    if cause.change is PlanChange.LINKS:
        return (
            f"an all-reduce takes {duration(cause.measured)} where {duration(cause.foreseen)} were foreseen "
            f"({cause.measured / cause.foreseen:.2f} times)"
        )
    who = f"rank {cause.rank} ({cause.device})"
    if cause.change in (PlanChange.SLOWER, PlanChange.FASTER):
        return (
            f"{who} computes {duration(cause.measured)} a step where {duration(cause.foreseen)} were foreseen "
            f"({cause.measured / cause.foreseen:.2f} times)"
        )
    message = "its plan takes" if cause.change is PlanChange.TIGHT else "its plan was made for"
    return f"{who} has {short(cause.measured, 'B')} of memory for a step, and {message} {short(cause.foreseen, 'B')}"


def _costs(costs: ReplanCosts) -> str:
    formats = "; ".join(
        f"{name}: {', '.join(f'{count} in {fmt}' for fmt, count in sorted(item.items()))}"
        for name, item in costs.formats.items()
    )
    buckets = ", ".join(f"{count} in {codec}" for codec, count in sorted(costs.codecs.items()))
    sent = f"; buckets of gradients: {buckets}" if buckets else ""
    return f"{duration(costs.seconds)} a step, variance {costs.variance:.4g}; {formats}{sent}"


def _listed(texts: Any) -> str:
    result: Sequence[str] = list(texts)
    return "; ".join(result[:3]) + (
        f"; and {len(result) - 3} ranks more" if len(result) > 3 else ""
    )


_LOG = logging.getLogger("qsync_fx.distributed")
_EQUAL: Final = "the best plan now is the one that is in force"


@dataclass(frozen=True)
class Replanning:
    """What `guard(model, replan=...)` goes by.

    Attributes:
        found: what `qsync_fx.distributed.measure_and_plan` returned, which the model trains under.
        tolerance, patience, cooldown, gain: what a step may differ from what is foreseen, as a share; how many steps in a row have to
            differ by more; how many steps after a decision count for nothing; and the share of time or variance that another plan has to
            win.
        links: what an all-reduce between steps may differ from what is foreseen, as a share, twice in a row with `patience` steps
            between, where the plan was found with codecs.
        compression: what `compress(ddp, found)` returned, where the plan was found with codecs: another plan may have others.
        free: returns the bytes that this rank's device has free, for who knows better than the system; None for nothing known.
        clock: in seconds; by default that of the wall, which sees whatever holds a device up, other programs among it.
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
                f"nothing was measured for this {type(self.found).__name__}, so that another cannot be found from it",
                where="Replanning",
                do="give what qsync_fx.distributed.measure_and_plan returned in this process",
            )
        sent = None if self.compression is None else self.compression.nodes
        if nodes_noted(self.found.notes) is not None or sent is not None:
            raise OptionError(
                "codecs between nodes are not changed in the middle of training",
                where="Replanning",
                do="give find_plan and compress hierarchical=False, find the plan without codecs, or leave replanning out",
            )
        if CODECS in self.found.notes and not _sends(self.compression, self.found):
            raise OptionError(
                "the plan was found with codecs of gradients, and replanning does not know who sends gradients so",
                where="Replanning(compression=...)",
                do="give what qsync_fx.distributed.compress(ddp, found) returned for this plan",
            )
        self.hysteresis  # noqa: B018 - says what cannot be

    @property
    def hysteresis(self) -> Hysteresis:
        return Hysteresis(self.tolerance, self.patience, self.cooldown, self.gain, self.links)


class Replanner:
    """Replanning of one training, on one rank; `begin` and `end` stand around each step of the optimizer.

    Attributes:
        found: the plan in force.
        history: what was decided so far.
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
        """Notes that the optimizer's step begins."""
        self.pace.begin()

    def end(self) -> None:
        """Looks at the step that ends; after every `patience` of them the ranks compare, and all are here at the same step."""
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
        # Of a step that takes more than foreseen, so much less may be planned for.
        return Room(
            allowed / max(1.0, self._peaks.over or 1.0), foreseen.peak, self._planned.get(self._own)
        )

    def _exchanged(self, mine: Stated) -> list[Stated]:
        """Returns what all ranks state."""
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
        """Returns what rank 0 tells the others: what is decided, and the plan to switch to."""
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
            saved = f"no plan would do: {error.what}"
            return {
                "plan": None,
                "replanned": ReplanReport(self._steps, causes, None, kept=saved).to_dict(),
            }
        now = under(old, answer)
        before, after = ReplanCosts.of(now, old.plans), ReplanCosts.of(answer.judged, answer.plans)
        saved = self._kept(old, answer, before, after, not _over(now.exceeds(answer.problem)))
        self._solution = None if saved else FleetPlan.of(answer, survey)
        text = None if self._solution is None else self._solution.to_json()
        decided = ReplanReport(self._steps, causes, before, None if saved else after, saved)
        return {"plan": text, "replanned": decided.to_dict()}

    def _kept(
        self, old: PlanResult, new: PlanResult, before: ReplanCosts, after: ReplanCosts, fits: bool
    ) -> str:
        """Returns why the plan in force is kept; "" where it is not."""
        if new.plans == old.plans and new.codecs == old.codecs:
            return _EQUAL
        costs = (before.seconds, before.variance), (after.seconds, after.variance)
        if wins(*costs, fits, self._how.gain):
            return ""
        return f"the best one now wins less than {self._how.gain:.0%} of time or variance"

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
    """Raises `OptionError` where a model does not train under the plan, or trains in a way that no plan is for."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise OptionError(
            "plans are found for DistributedDataParallel, and this model is sharded",
            where="Replanning",
            do="leave replan= out",
        )
    digest = result.for_class(result.ranks[distributed.get_rank()]).notes[CLUSTER]
    in_force = {
        None if options.plan is None else options.plan.notes.get(CLUSTER)
        for options in options_of(model)
    }
    if in_force != {digest}:
        raise OptionError(
            "the model does not train under the plan that replanning starts from",
            where="Replanning",
            do='give torch.compile(model, backend="qsync", options={"plan": found}) what find_plan returned, too',
        )


def _sends(compression: DdpCompressor | None, result: FleetPlan) -> bool:
    """Whether gradients are sent as a plan says."""
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
