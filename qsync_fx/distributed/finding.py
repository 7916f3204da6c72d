"""`find_plan` for ranks that are up: each measures itself, rank 0 chooses, and all get the plan for the cluster.

Invariant: all ranks return the same plan, with the class of each rank in its table, or all raise: an error of one is told on all of them.
While a rank measures itself or runs a plan, and while rank 0 chooses, no other is in a collective, so that it hears of an error at once.
"""

from __future__ import annotations

import inspect
import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from qsync_fx.allocator.asking import Objective, Wishes
from qsync_fx.allocator.rounds import CORRECTIONS, Rounds, check_corrections
from qsync_fx.codec import Path
from qsync_fx.communication.control import CPU
from qsync_fx.devices import names
from qsync_fx.distributed.agreeing import statements
from qsync_fx.distributed.agreeing.meeting import COMPILING, Meeting, several_ranks
from qsync_fx.distributed.averaging import samples_in
from qsync_fx.distributed.hosts import FLAT, Links, in_a_row, links_between_nodes
from qsync_fx.distributed.survey import FoundPlan, Survey
from qsync_fx.errors import OptionError, PlanError, nearest, shown
from qsync_fx.plan import ClusterPlan
from qsync_fx.plan.cluster_plan import is_called
from qsync_fx.plan.plan_file import CLUSTER_PLAN
from qsync_fx.precision import Precision
from qsync_fx.predictor.replay.memory_size import Memory
from qsync_fx.profiling.given import GivenOptimizer
from qsync_fx.profiling.measurement import measure
from qsync_fx.profiling.measuring.steps import StepFunction, first_batch
from qsync_fx.profiling.profile import PROFILE, Profile
from qsync_fx.profiling.statistics.indicators.methods import method
from qsync_fx.this_process import named_class, this_process


def find_plan(
    model: nn.Module,
    step: StepFunction,
    batches: Iterable[Any],
    *,
    optimizer: GivenOptimizer | None = None,
    device_class: str | None = None,
    objective: Objective = "hybrid",
    budget: str | float | None = None,
    memory: Mapping[str, Memory] | Memory | None = None,
    target: str | float | None = None,
    margin: float | None = None,
    precisions: Sequence[str | Precision] | None = None,
    codecs: Sequence[str] = (),
    hierarchical: bool | int | None = None,
    save: Path | None = None,
    corrections: int = CORRECTIONS,
    compiling: float = COMPILING,
    silence: float | None = None,
    progress: bool = True,
    **measuring: Any,
) -> FoundPlan:
    """Returns the plan that is best for the ranks that are up; every rank calls it, after `init_process_group`, with the model as written.

    Args:
        model, step, batches, optimizer: as `qsync_fx.measure` takes them.
        device_class: what the class of this rank's device is called; by default by the environment variable QSYNC_DEVICE_CLASS, or after
            the device. Ranks of one class get one plan.
        objective, budget, memory, target, margin: as `qsync_fx.find_plan` takes them, classes by these names. Rank 0's count.
        precisions: formats to measure, and to choose from.
        codecs: what a bucket of gradients may be sent in beside FP32, as `qsync_fx.find_plan` takes them. Rank 0's count. A plan that has
            codecs is applied by `compress(ddp, plan)`, on all ranks.
        hierarchical: whether codecs are chosen for what goes between nodes alone, as `compress` takes it, which goes by what the plan
            says of it. By default they are where there are several nodes, all of as many ranks, several of them. Rank 0's count.
        save: the file that rank 0 writes the plan to.
        corrections: how often at most every rank runs its part of the plan and corrects its profile, so that rank 0 chooses again, until
            what is foreseen and what is measured agree; 0 to leave it. Rank 0's count.
        compiling, silence: seconds that a rank may take to measure, and say nothing, as of a guard.
        progress: whether rank 0 shows how far it is.
        measuring: what else `qsync_fx.measure` takes. Each rank has a file of its own for its profile: rank 1 makes "profile.1.json" of
            `path="profile.json"`.

    Raises:
        RankError: another rank has failed, or has another model.
        QSyncError: this one has: it cannot be measured, or no plan keeps the limits.
    """
    mine = device_class or named_class() or _class_of(this_process().device)
    wishes: dict[str, Any] = {
        "objective": objective,
        "budget": budget,
        "memory": memory,
        "target": target,
        "margin": margin,
        "codecs": codecs,
    }

    def check_arguments() -> None:
        Wishes(**{**wishes, "precisions": precisions}).check()
        check_corrections(corrections)
        _check_measuring(measuring)

    if not several_ranks():
        check_arguments()
        _check_classes(memory, [mine])
        if save is not None:
            CLUSTER_PLAN.check_writable(save)
        first, batches = first_batch(batches)
        profile = measure(model, step, batches, precisions, optimizer=optimizer, progress=progress, **measuring)
        alone = _Choosing([mine], [profile], wishes, [samples_in(first)], corrections)
        while (plan := alone.next) is not None:
            ran = {**measuring, "optimizer": optimizer, "progress": progress, "plan": plan.classes[mine]}
            profile = measure(model, step, [first], profile=profile, **ran)
            alone.learn([profile])
        return alone.taken(save)
    with Meeting(compiling, silence, collectives=False) as meeting:
        check_arguments()
        if save is not None and meeting.rank == 0:
            CLUSTER_PLAN.check_writable(save)

        def watched(module: Any, batch: Any) -> Tensor:
            meeting.check()
            return step(module, batch)

        first, batches = first_batch(batches)
        meeting.put("class", mine)
        meeting.agree("models", statements.of_model(model), statements.REMEDIES)
        if meeting.rank == 0:
            _check_classes(memory, [meeting.get("class", rank, compiling) for rank in range(meeting.world)])
        if codecs and isinstance(hierarchical, int) and not isinstance(hierarchical, bool):
            in_a_row(hierarchical, meeting.world)
        meeting.agree("arguments", {}, {})  # no rank measures before rank 0 has checked the classes
        how: dict[str, Any] = {"optimizer": optimizer, "progress": progress and meeting.rank == 0}
        if (path := measuring.get("path")) is not None:
            how["path"] = _of_rank(path, meeting.rank)

        def here() -> None:
            # All are here before any of them waits for another in a collective.
            meeting.agree("measurements", {}, {}, patient=True)

        profile = measure(model, watched, batches, precisions, **{**measuring, **how, "all_reduce": here})
        device = next((parameter.device for parameter in model.parameters()), CPU)
        links = links_between_nodes(meeting, hierarchical if codecs else False, compiling, device)
        meeting.put("batch", str(samples_in(first)))
        meeting.put("profile", profile.to_json())
        choosing: _Choosing | None = None
        if meeting.rank == 0:
            classes, samples = (
                [meeting.get(key, rank, compiling) for rank in range(meeting.world)] for key in ("class", "batch")
            )
            profiles = _profiles(meeting, "profile", compiling)
            choosing = _Choosing(classes, profiles, wishes, [int(one) for one in samples], corrections, links)
        for at in itertools.count():
            if choosing is not None:
                meeting.put(f"plan {at} to run", "" if choosing.next is None else choosing.next.to_json())
            if not (text := meeting.get(f"plan {at} to run", 0, compiling)):
                break
            part = ClusterPlan.from_json(text).classes[mine]
            profile = measure(model, watched, [first], profile=profile, **{**measuring, **how, "plan": part})
            meeting.put(f"profile {at}", profile.to_json())
            if choosing is not None:
                choosing.learn(_profiles(meeting, f"profile {at}", compiling))
        if choosing is not None:
            chosen = choosing.taken(save)
            meeting.put("plan", chosen.to_json())
        found = ClusterPlan.from_json(meeting.get("plan", 0, compiling))
        meeting.agree("plans", {"plan": [found.to_json()]}, {})
        return FoundPlan(found) if choosing is None else chosen


class _Choosing:
    """What the rank that chooses does: from profiles of all ranks to plans to run, and to the one to take.

    Attributes:
        next: the plan to run next; None where there is none.
    """

    def __init__(
        self,
        classes: Sequence[str],
        profiles: Sequence[Profile],
        wishes: Mapping[str, Any],
        samples: Sequence[int],
        corrections: int,
        links: Links = FLAT,
    ) -> None:
        self._survey = Survey.of(classes, profiles, wishes, samples, links)
        self._samples = samples
        self._rounds = Rounds(self._survey.answer(), lambda _: self._survey.answer(), corrections)

    @property
    def next(self) -> FoundPlan | None:
        return self._found() if self._rounds.more else None

    def learn(self, profiles: Sequence[Profile]) -> None:
        """Takes the profiles of all ranks, as they have corrected them by the plan that they have run."""
        before = self._survey
        self._survey = Survey.of(before.ranks, profiles, before.wishes, self._samples, before.links)
        self._rounds.learn(self._survey.profiles, before.profiles, self._survey.profiles)

    def taken(self, save: Path | None) -> FoundPlan:
        """Returns the plan to take; writes it where that is wished."""
        found = self._found()
        if save is not None:
            found.save(save)
        return found

    def _found(self) -> FoundPlan:
        return FoundPlan.of(self._rounds.answer, self._survey)


def _check_measuring(measuring: Mapping[str, Any]) -> None:
    """Raise `OptionError` for arguments that `measure` or `find_plan` would refuse later on."""
    ours = ("model", "step", "batches", "precisions", "optimizer", "profile", "progress")
    names = set(inspect.signature(measure).parameters).difference(ours)
    for name in measuring:
        if name not in names:
            raise OptionError(f"find_plan has no argument {shown(name)}", do=nearest(name[:40], names))
    if "sensitivity" in measuring:
        if measuring["sensitivity"] is None:
            raise OptionError(
                "a plan is chosen by the sensitivity of each operator, and none would be measured",
                where="sensitivity=None",
                do='leave the argument out, or name a method, such as "exact"',
            )
        method(measuring["sensitivity"])


def _check_classes(memory: Mapping[str, Memory] | Memory | None, classes: Sequence[str]) -> None:
    """Raise `PlanError` if `memory` names a class of devices that no rank has."""
    for name in memory if isinstance(memory, Mapping) else ():
        if name not in classes:
            raise PlanError(f"there are no devices {shown(name)}", where="memory", do=nearest(name, set(classes)))


def _profiles(meeting: Meeting, key: str, limit: float) -> list[Profile]:
    return [PROFILE.decode(meeting.get(key, rank, limit)) for rank in range(meeting.world)]


def _of_rank(path: Path, rank: int) -> pathlib.Path:
    found = pathlib.Path(path)
    return found.with_name(f"{found.stem}.{rank}{found.suffix}")


def _class_of(device: str) -> str:
    """Returns the name of a device in the catalog, or what it is called."""
    return max((name for name in names() if is_called(device, name)), key=len, default=device)
