"""Plan of a running cluster: ranks profile themselves, rank 0 solves and broadcasts.

Invariant: all ranks return the same plan, or all raise. While a rank measures or rank 0 solves, no
other rank waits in a collective, so errors propagate at once.
"""

from __future__ import annotations

import inspect
import itertools
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from torch import Tensor, nn

from qsync_fx.allocator.api import check_joint, find_plan, get_allocator
from qsync_fx.allocator.evaluator import PlanEvaluator, evaluate_plan
from qsync_fx.allocator.measure_and_replan import MAX_REPLANS, ReplanLoop, check_max_replans
from qsync_fx.allocator.plan_result import PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Problem
from qsync_fx.allocator.problem_builder import PlanRequest, build_problem
from qsync_fx.communication.control_group import CPU
from qsync_fx.devices.device_catalog import names
from qsync_fx.distributed.agreement import COMPILING, Meeting, of_model, several_ranks
from qsync_fx.distributed.drift import LinkProbe, LinkTimes
from qsync_fx.distributed.node_topology import FLAT, NodeLinks, in_a_row, links_between_nodes
from qsync_fx.distributed.sample_weighted_mean import samples_in
from qsync_fx.errors import OptionError, PlanError, nearest, shown
from qsync_fx.formats import Precision
from qsync_fx.plan import cluster_plan
from qsync_fx.plan.cluster_plan import TRANSPORT, ClusterPlan, between_nodes, is_called
from qsync_fx.plan.plan import CLUSTER_PLAN
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Memory, Node
from qsync_fx.profiler.measurement import GivenOptimizer, measure
from qsync_fx.profiler.profile import PROFILE, Collective, Profile
from qsync_fx.profiler.sensitivity.gradient_step import method, with_samples
from qsync_fx.profiler.timing.step_timers import StepFunction, check_model, first_batch
from qsync_fx.serialization.schema import Path
from qsync_fx.timeline.device_profiles import load_device_profiles

CODECS: Final = "codecs"  # key of the plan note that lists the codecs that the solver may choose


@dataclass(frozen=True)
class FleetConditions:
    """Changes of ranks and links since the ranks were measured.

    Attributes:
        slowdowns: factor on all durations, by class.
        memory: bytes that a step may use, by class; None for the limits of the planning request.
        links: measurements that replace those in the profiles.
    """

    slowdowns: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] | None = None
    links: LinkTimes | None = None


@dataclass(frozen=True)
class PlanSurvey:
    """Measurements of all ranks, from which plans are solved.

    Attributes:
        wishes: keyword arguments of `qsync_fx.find_plan`.
        batches: samples per step, by class, if known.
        sizing: its arguments `batch` and `min_batch`, if batches are planned.
        joint: the plan that chose `batches`; None if they were not chosen, or not yet.
        paces: measured over interpolated seconds of a plan, by class, from a run of the plan with
            other batches.
    """

    ranks: tuple[str, ...]
    profiles: Mapping[str, Profile] = field(repr=False)
    wishes: Mapping[str, Any]
    batches: Mapping[str, int] = field(default_factory=dict)
    links: NodeLinks = FLAT
    sizing: Mapping[str, Any] = field(default_factory=dict)
    joint: PlanResult | None = field(default=None, repr=False)
    paces: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        ranks: Sequence[str],
        profiles: Sequence[Profile],
        wishes: Mapping[str, Any],
        samples: Sequence[int],
        links: NodeLinks = FLAT,
        sizing: Mapping[str, Any] = MappingProxyType({}),
    ) -> PlanSurvey:
        """Return the survey of all ranks, whose samples per step are 0 if unknown."""
        slowest: dict[str, Profile] = {}
        batches: dict[str, int] = {}
        for name, profile, batch in zip(ranks, profiles, samples, strict=True):
            if name not in slowest or _seconds(profile) > _seconds(slowest[name]):
                slowest[name], batches[name] = profile, batch
        available = {name: batch for name, batch in batches.items() if batch}
        return cls(tuple(ranks), slowest, wishes, available, links, sizing)

    def at_batches(self, joint: PlanResult) -> PlanSurvey:
        """Return the survey with the batches of a joint plan, at which formats are planned."""
        profiles = {
            name: profile.at_batch(joint.batches[name]) for name, profile in self.profiles.items()
        }
        return replace(self, profiles=profiles, batches=joint.batches, joint=joint)

    def answer(self, conditions: FleetConditions = FleetConditions()) -> PlanResult:
        """Return the result of `qsync_fx.find_plan`; batches that were chosen stay."""
        profiles, cluster, wishes = self._inputs(conditions)
        # The link measurements of the cluster are in the profiles.
        if self.joint is None:
            result = find_plan(profiles, cluster, **wishes, **self.sizing)
        else:
            result = self._solved(self.joint, profiles, cluster, wishes)
            kind = PlanNoteKind.PLANNED_BATCH
            others = [note for note in result.notes if note.kind is not kind]
            notes = (*others, *(note for note in self.joint.notes if note.kind is kind))
            result = replace(result, batches=self.joint.batches, notes=notes)
        if self.links.uneven:
            return replace(result, notes=(*result.notes, PlanNote(PlanNoteKind.UNEVEN)))
        return result

    def move_samples(
        self, active: PlanResult, conditions: FleetConditions
    ) -> tuple[PlanSurvey, PlanResult]:
        """Plan batches and formats again; return the survey at the new batches, and the plan.

        The samples of a step stay. A run of the active plan has corrected the profile of a class at
        its batch only; at the other batches, the correction is a factor on all durations.
        """
        profiles = {
            name: replace(profile, runs=[run for run in profile.runs if not run.planned])
            for name, profile in self.profiles.items()
        }
        interpolated = replace(self, profiles=profiles)
        measured, predicted = (
            PlanEvaluator(each.problem(), active.plans) for each in (self, interpolated)
        )
        paces = {
            name: self.paces.get(name, 1.0) * measured.computing(name) / predicted.computing(name)
            for name in profiles
        }
        sizing = {**self.sizing, "batch": "global"}
        survey = replace(interpolated, sizing=sizing, joint=None, paces=paces)
        result = survey.answer(conditions)
        return survey.at_batches(result), result

    def problem(self, conditions: FleetConditions = FleetConditions()) -> Problem:
        """Return the planning problem at the batches of the survey."""
        profiles, cluster, wishes = self._inputs(conditions)
        fleet, available = load_device_profiles(profiles, cluster)
        return build_problem(fleet, available, PlanRequest(**wishes))[0]

    def _inputs(
        self, conditions: FleetConditions
    ) -> tuple[dict[str, Profile], Cluster, dict[str, Any]]:
        """Return profiles, cluster and request under changed conditions."""
        counts, node = Counter(self.ranks), Node(self.links.size)
        devices, profiles = {}, dict(self.profiles)
        for name, profile in self.profiles.items():
            slowdown = conditions.slowdowns.get(name, 1.0) * self.paces.get(name, 1.0)
            batch = self.batches.get(name)
            devices[name] = ClusterDevice(counts[name], slowdown=slowdown, batch=batch, node=node)
            if conditions.links is not None:
                collectives = [_updated(item, conditions.links) for item in profile.collectives]
                profiles[name] = replace(profile, collectives=collectives)
        wishes = dict(self.wishes)
        if conditions.memory is not None:
            wishes["memory"] = conditions.memory
        return profiles, Cluster(devices), wishes

    def _solved(
        self,
        joint: PlanResult,
        profiles: Mapping[str, Profile],
        cluster: Cluster,
        wishes: Mapping[str, Any],
    ) -> PlanResult:
        """Return the plan at the joint plan's batches, with its step time as the target if it is
        feasible.
        """
        if wishes["objective"] != "hybrid" or wishes["target"] is not None:
            return find_plan(profiles, cluster, **wishes)
        try:
            result = find_plan(profiles, cluster, **{**wishes, "target": joint.problem.seconds})
        except PlanError:
            result = find_plan(profiles, cluster, **wishes)
        if result.problem.open == joint.problem.open:
            return result
        # With other batches, another class computes fastest and would be fixed.
        classes = {
            name: replace(part, fixed_plan=joint.problem.classes[name].fixed_plan)
            for name, part in result.problem.classes.items()
        }
        problem = replace(result.problem, classes=classes)
        try:
            return replace(get_allocator("milp").allocate(problem), notes=joint.notes)
        except PlanError:
            evaluation = evaluate_plan(problem, joint.plans, joint.evaluation.codecs)
            return replace(joint, problem=problem, evaluation=evaluation, bound=None)


def _updated(collective: Collective, links: LinkTimes) -> Collective:
    """Return measurements with newer ones for the transports and groups in `links`."""
    exchanges = {(item.transport, item.group): item for item in collective.exchanges}
    exchanges |= {(item.transport, item.group): item for item in links.exchanges}
    table = list(links.all_reduce)
    return replace(collective, seconds=table, exchanges=list(exchanges.values()))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class FleetPlan(ClusterPlan):
    """Cluster plan that ranks found for themselves; it compares equal to the plain cluster plan.

    On rank 0 it has the measurements of all ranks and the result of the solver, which are neither
    saved nor pickled; they are None on the others.
    """

    survey: PlanSurvey | None
    answer: PlanResult | None

    def __init__(
        self, plan: ClusterPlan, survey: PlanSurvey | None = None, answer: PlanResult | None = None
    ) -> None:
        super().__init__(**{part.name: getattr(plan, part.name) for part in fields(ClusterPlan)})
        object.__setattr__(self, "survey", survey)
        object.__setattr__(self, "answer", answer)

    @classmethod
    def of(cls, answer: PlanResult, survey: PlanSurvey) -> FleetPlan:
        """Return the plan of a result, with the device class of each rank."""
        notes = {"answer": str(answer)}
        if answer.problem.coding is not None:
            notes[CODECS] = " ".join(answer.problem.coding.codecs)
            notes[TRANSPORT] = answer.problem.cluster.transport
            notes |= LinkProbe.of(answer.problem.cluster).notes()
            if (size := survey.links.size) > 1:
                notes |= between_nodes(size, survey.links.in_a_row)
        plan = ClusterPlan(
            answer.to_plans(),
            ranks=survey.ranks,
            notes=notes,
            codecs=answer.codecs,
            batches=answer.batches,
        )
        return cls(plan, survey, answer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterPlan):
            return NotImplemented
        names = ("classes", "devices", "ranks", "codecs", "batches", "memory_budgets")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    __hash__ = ClusterPlan.__hash__


def _seconds(profile: Profile) -> float:
    return sum(sum(step) for step in profile.runs[0].steps) / len(profile.runs[0].steps)


def measure_and_plan(
    model: nn.Module,
    step: StepFunction | None = None,
    batches: Iterable[Any] = (),
    *,
    optimizer: GivenOptimizer | None = None,
    device_class: str | None = None,
    objective: str = "hybrid",
    budget: str | float | None = None,
    memory: Mapping[str, Memory] | Memory | None = None,
    target: str | float | None = None,
    margin: float | None = None,
    precisions: Sequence[str | Precision] | None = None,
    codecs: Sequence[str] = (),
    inside_codecs: Sequence[str] = (),
    batch: Literal["global"] | tuple[int, int] | None = None,
    min_batch: int = 1,
    hierarchical: bool | int | None = None,
    save: Path | None = None,
    max_replans: int = MAX_REPLANS,
    compiling: float = COMPILING,
    silence: float | None = None,
    progress: bool = True,
    **measuring: Any,
) -> FleetPlan:
    """Return the best plan for the running ranks; call it on every rank with the uncompiled model.

    Call it after `init_process_group`. Rank 0's planning request is used: objective, limits,
    codecs, `hierarchical` and `max_replans`. Raise `RankError` if another rank has failed or has a
    different model, `QSyncError` if this rank cannot be measured or no plan satisfies the limits.

    Args:
        model, step, batches, optimizer: as of `qsync_fx.measure`.
        device_class: name of this rank's device class; by default the environment variable
            QSYNC_DEVICE_CLASS, or the name of the device. Ranks of one class share one plan.
        objective, budget, memory, target, margin: as of `qsync_fx.find_plan`, with these classes.
        precisions: formats to measure and to choose from.
        codecs: codecs of gradient buckets to choose from in addition to FP32; apply them by
            `compress(ddp, plan)` on all ranks. With planned batches, gradients are weighted by
            samples before they are coded: call `average_by_batch`, too.
        inside_codecs: codecs inside nodes to choose from in addition to FP32.
        batch: as of `qsync_fx.find_plan`: "global" to plan the samples of each rank's step, which
            `DistributedBatchSampler` and `average_by_batch` apply. Each rank then measures several
            batch sizes, by default half, all and three halves of the first batch's samples.
        min_batch: least samples per rank for `batch`.
        hierarchical: whether codecs are chosen for traffic between nodes only, as of `compress`,
            which follows the plan. Default: True if there are several nodes, each with the same
            number of ranks, which is more than one.
        save: path of the file that rank 0 writes the plan to.
        max_replans: maximum number of rounds in which every rank runs its part of the plan and
            corrects its profile, and rank 0 solves again, until prediction and measurement agree.
            Planned batches stay as they are.
        compiling, silence: seconds that a rank may measure or send no heartbeat, as of a guard.
        progress: whether rank 0 shows progress.
        measuring: further arguments of `qsync_fx.measure`. With `path="profile.json"` rank 1 writes
            "profile.1.json".
    """
    check_model(model)
    if step is None:
        do = "give step(model, batch), which returns the loss"
        raise OptionError("there is no step to measure", where="step", do=do)
    called = cluster_plan.this_process().device
    mine = device_class or cluster_plan.named_class() or _class_of(called)
    wishes: dict[str, Any] = {"objective": objective, "budget": budget, "memory": memory}
    wishes |= {"target": target, "margin": margin, "codecs": codecs}
    wishes["inside_codecs"] = inside_codecs

    def check_arguments() -> None:
        PlanRequest(**{**wishes, "precisions": precisions}).check()
        check_joint(batch)
        if batch is None and measuring.get("batch_sizes"):
            message = "batch sizes are measured only to plan batches"
            raise OptionError(message, where="batch_sizes", do='add batch="global"')
        check_max_replans(max_replans)
        _check_measuring(measuring)

    sizing: dict[str, Any] = {}
    if batch is not None:
        sizing = {"batch": batch, "min_batch": min_batch}
    if not several_ranks():
        check_arguments()
        _check_classes(memory, [mine])
        if save is not None:
            CLUSTER_PLAN.check_writable(save)
        first, batches = first_batch(batches)
        measuring |= {"optimizer": optimizer, "progress": progress}
        profile = measure(
            model, step, batches, precisions, **_with_batch_sizes(measuring, batch, first)
        )
        samples = [samples_in(first)]
        survey = PlanSurvey.of([mine], [profile], wishes, samples, sizing=sizing)
        alone = _Choosing(survey, samples, max_replans)
        measuring.pop("batch_sizes", None)
        while (plan := alone.next) is not None:
            first, profile = _at_planned_batch(first, profile, plan.batches.get(mine))
            part = plan.classes[mine]
            profile = measure(model, step, [first], profile=profile, plan=part, **measuring)
            alone.learn([profile])
        return alone.final(save)
    with Meeting(compiling, silence, collectives=False) as meeting:
        check_arguments()
        if save is not None and meeting.rank == 0:
            CLUSTER_PLAN.check_writable(save)

        def watched(module: Any, batch: Any) -> Tensor:
            meeting.check()
            return step(module, batch)

        first, batches = first_batch(batches)
        meeting.put("class", mine)
        meeting.agree("models", of_model(model))
        if meeting.rank == 0:
            _check_classes(memory, meeting.get_all("class", compiling))
        if codecs and isinstance(hierarchical, int) and not isinstance(hierarchical, bool):
            in_a_row(hierarchical, meeting.world)
        meeting.agree("arguments", {})  # no rank measures before rank 0 has checked the classes
        measuring |= {"optimizer": optimizer, "progress": progress and meeting.rank == 0}
        if (path := measuring.get("path")) is not None:
            path = pathlib.Path(path)
            measuring["path"] = path.with_stem(f"{path.stem}.{meeting.rank}")

        def current() -> None:
            # All ranks arrive here before any of them waits for another in a collective.
            meeting.agree("measurements", {}, patient=True)

        sized = _with_batch_sizes(measuring, batch, first)
        profile = measure(model, watched, batches, precisions, **{**sized, "all_reduce": current})
        device = next((parameter.device for parameter in model.parameters()), CPU)
        grouping = bool(codecs) and hierarchical
        links = links_between_nodes(meeting, grouping, compiling, device)
        profile = _with_exchanges(profile, links)
        if path is not None and links.exchanges:
            profile.save(measuring["path"])
        meeting.put("batch", str(samples_in(first)))
        meeting.put("profile", profile.to_json())
        choosing: _Choosing | None = None
        if meeting.rank == 0:
            classes = meeting.get_all("class", compiling)
            samples = [int(item) for item in meeting.get_all("batch", compiling)]
            profiles = _profiles(meeting, "profile", compiling)
            survey = PlanSurvey.of(classes, profiles, wishes, samples, links, sizing)
            choosing = _Choosing(survey, samples, max_replans)
        measuring.pop("batch_sizes", None)
        for index in itertools.count():
            if choosing is not None:
                plan = choosing.next
                meeting.put(f"plan {index} to run", "" if plan is None else plan.to_json())
            if not (text := meeting.get(f"plan {index} to run", 0, compiling)):
                break
            received = ClusterPlan.from_json(text)
            first, profile = _at_planned_batch(first, profile, received.batches.get(mine))
            part = received.classes[mine]
            profile = measure(model, watched, [first], profile=profile, plan=part, **measuring)
            meeting.put(f"profile {index}", profile.to_json())
            if choosing is not None:
                choosing.learn(_profiles(meeting, f"profile {index}", compiling))
        if choosing is not None:
            chosen = choosing.final(save)
            meeting.put("plan", chosen.to_json())
        result = ClusterPlan.from_json(meeting.get("plan", 0, compiling))
        meeting.agree("plans", {"plan": [result.to_json()]})
        return FleetPlan(result) if choosing is None else chosen


class _Choosing:
    def __init__(self, survey: PlanSurvey, samples: Sequence[int], max_replans: int) -> None:
        answer = survey.answer()
        if answer.batches:
            survey = survey.at_batches(answer)
            samples = [answer.batches[name] for name in survey.ranks]
        self._survey, self._samples = survey, samples
        self._rounds = ReplanLoop(answer, lambda _: self._survey.answer(), max_replans)

    @property
    def next(self) -> FleetPlan | None:
        return self._fleet_plan() if self._rounds.more else None

    def learn(self, profiles: Sequence[Profile]) -> None:
        """Solve again from the profiles that ranks corrected by running the last plan."""
        before = self._survey
        self._survey = replace(
            PlanSurvey.of(
                before.ranks,
                profiles,
                before.wishes,
                self._samples,
                before.links,
                before.sizing,
            ),
            joint=before.joint,
        )
        self._rounds.learn(self._survey.profiles, before.profiles, self._survey.profiles)

    def final(self, save: Path | None) -> FleetPlan:
        result = self._fleet_plan()
        if save is not None:
            result.save(save)
        return result

    def _fleet_plan(self) -> FleetPlan:
        return FleetPlan.of(self._rounds.answer, self._survey)


def _with_batch_sizes(measuring: Mapping[str, Any], batch: object, first: Any) -> Mapping[str, Any]:
    """Return the arguments of `measure`, with batch sizes if batches are to be planned."""
    if batch is None or "batch_sizes" in measuring:
        return measuring
    samples = samples_in(first)
    half = max(1, samples // 2)
    sizes = dict.fromkeys((samples, half, samples + half))
    return {**measuring, "batch_sizes": [size for size in sizes if size]}


def _at_planned_batch(first: Any, profile: Profile, batch: int | None) -> tuple[Any, Profile]:
    """Return a batch and the profile for the planned number of samples, if there is one."""
    if batch is None:
        return first, profile
    first = with_samples(first, batch)
    return first, profile if batch == profile.batch_size else profile.at_batch(batch)


def _check_measuring(measuring: Mapping[str, Any]) -> None:
    ours = ("model", "step", "batches", "precisions", "optimizer", "profile", "progress")
    names = set(inspect.signature(measure).parameters).difference(ours)
    for name in measuring:
        if name not in names:
            text = f"measure_and_plan has no argument {shown(name)}"
            raise OptionError(text, do=nearest(name[:40], names))
    if "sensitivity" in measuring:
        if measuring["sensitivity"] is None:
            text = "planning requires the sensitivity of each operator"
            do = 'remove the argument, or use a method such as "second_order"'
            raise OptionError(text, where="sensitivity=None", do=do)
        method(measuring["sensitivity"])


def _with_exchanges(profile: Profile, links: NodeLinks) -> Profile:
    """Return the profile with measured exchanges inside and between nodes."""
    collectives = [
        replace(item, exchanges=[*item.exchanges, *links.exchanges]) for item in profile.collectives
    ]
    return replace(profile, collectives=collectives)


def _check_classes(memory: Mapping[str, Memory] | Memory | None, classes: Sequence[str]) -> None:
    if not isinstance(memory, Mapping):
        return
    for name in memory:
        if name not in classes:
            description = f"no rank has the device class {shown(name)}"
            raise PlanError(description, where="memory", do=nearest(name, set(classes)))


def _profiles(meeting: Meeting, key: str, limit: float) -> list[Profile]:
    return [PROFILE.decode(text) for text in meeting.get_all(key, limit)]


def _class_of(device: str) -> str:
    """Return the catalog name of a device, or its own name if the catalog has none."""
    return max((name for name in names() if is_called(device, name)), key=len, default=device)
