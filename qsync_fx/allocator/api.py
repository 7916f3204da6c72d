"""Planning entry point `find_plan`, plan diagnosis, allocator registry and plan cache.

Each module of this package that implements allocators defines `ALLOCATORS`, a tuple of them, which
`allocators` imports on first use; a new allocator is a new module (docs/howto-allocator.md).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, Never

import torch
from torch import nn

from qsync_fx.allocator.evaluator import PlanEvaluator, evaluate_plan
from qsync_fx.allocator.feasibility import margins, unfit, with_margin
from qsync_fx.allocator.joint_batches import BUDGETS, JointBatches
from qsync_fx.allocator.measure_and_replan import (
    MAX_REPLANS,
    TURNS,
    LocalModel,
    check_max_replans,
    settled,
)
from qsync_fx.allocator.plan_result import Allocator, PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import DeviceClass, width
from qsync_fx.allocator.problem_builder import (
    PlanRequest,
    build_problem,
    class_at_batch,
    with_measured_batches,
)
from qsync_fx.communication.codec_cost_model import by_bucket
from qsync_fx.devices.format_support import default_precision
from qsync_fx.devices.machine import here_for
from qsync_fx.entry_points import listed_in_modules
from qsync_fx.errors import OptionError, PlanError, ProfileError, nearest, shown
from qsync_fx.passes.cached_plan import CACHED_PLAN_FILE, SUFFIX, CachedPlan, folder
from qsync_fx.plan.cluster_plan import codes_inside
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.replayer.cluster import Cluster, Memory
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.profiler.measurement import GivenOptimizer
from qsync_fx.profiler.timing.step_timers import StepFunction, first_batch
from qsync_fx.progress import announced
from qsync_fx.serialization.schema import Path
from qsync_fx.timeline.device_profiles import (
    DeviceInputs,
    Given,
    load_device_profiles,
    model_instead_of_profile,
)

if TYPE_CHECKING:
    from qsync_fx.profiler.profile import Profile


NEAR: Final = 0.02
"""Relative distance to a limit below which the limit counts as binding."""
LONG: Final = 0.1
"""Share of the step above which waiting for gradients is reported."""


def diagnose(answer: PlanResult) -> Iterator[PlanNote]:
    """Yield notes on binding limits, communication, unhelpful devices and wide operators."""
    evaluator = PlanEvaluator(answer.problem, answer.plans, answer.evaluation.codecs)
    yield from _binding(answer)
    yield from _waiting(answer)
    if answer.codecs and (size := answer.problem.cluster.ranks_per_node) > 1:
        inside = codes_inside(answer.codecs)
        kind = PlanNoteKind.TWO_LEVELS if inside else PlanNoteKind.BETWEEN_NODES
        yield PlanNote(kind, numbers={"ranks a node": float(size)})
    yield from _joining(answer, evaluator)
    for name in answer.problem.open:
        yield from _not_faster(answer, evaluator, name)


def _binding(answer: PlanResult) -> Iterator[PlanNote]:
    """Yield the limits that the plan nearly reaches, unless a minimized variance is already 0."""
    problem, evaluation = answer.problem, answer.evaluation
    if problem.least == "variance" and not any(
        evaluation.classes[name].variance for name in problem.open
    ):
        return
    values = [
        ("", "seconds", evaluation.seconds, problem.seconds),
        ("", "variance", evaluation.variance, problem.variance),
    ]
    for name in problem.open:
        peak = float(evaluation.classes[name].peak_bytes or 0)
        values.append((name, "memory", peak, problem.classes[name].memory))
    for name, subject, value, limit in values:
        if limit and value > limit * (1 - NEAR):
            yield PlanNote(PlanNoteKind.BINDS, name, numbers={subject: value, "limit": limit})


def _waiting(answer: PlanResult) -> Iterator[PlanNote]:
    """Yield the classes that wait for gradients, if codecs are applicable but were not allowed."""
    cluster = answer.problem.cluster
    if answer.problem.coding is not None or cluster.nodes == 1:
        return
    for name, figures in answer.evaluation.classes.items():
        if figures.sending > LONG * answer.evaluation.seconds:
            numbers = {"seconds": figures.sending, "of a step of": answer.evaluation.seconds}
            yield PlanNote(PlanNoteKind.WAITS, name, numbers=numbers)


def _joining(answer: PlanResult, evaluator: PlanEvaluator) -> Iterator[PlanNote]:
    """Yield whether each open class raises the throughput; batches count as equal if unknown."""
    problem = answer.problem
    if len(problem.classes) == 1:
        return
    cluster = problem.cluster
    rate = (cluster.samples or cluster.ranks) / answer.evaluation.seconds
    for name in problem.open:
        if (alone := cluster.without(name)) is None:
            continue  # the links of the other ranks were not measured
        owned = {other: evaluator.schedules()[other] for other in alone.devices}
        coding = problem.coding
        settings = None if coding is None else by_bucket(owned, alone, answer.codecs, coding.rates)
        seconds = float(simulate(owned, alone, settings).step.seconds)
        without = ((cluster.samples and alone.samples) or alone.ranks) / seconds
        kind = PlanNoteKind.JOINS if rate > without else PlanNoteKind.DOES_NOT_HELP
        yield PlanNote(kind, name, numbers={"samples a second": rate, "without it": without})


def _not_faster(answer: PlanResult, evaluator: PlanEvaluator, name: str) -> Iterator[PlanNote]:
    """Yield the operators in a wide format for which no narrower format is faster on the device."""
    part, before = answer.problem.classes[name], evaluator.computing(name)
    for operator, requested in answer.plans[name].items():
        narrower = [fmt for fmt in part.choices[operator] if width(fmt) < width(requested)]
        more = {}
        for fmt in narrower:
            evaluator.set(name, operator, fmt)
            more[fmt] = evaluator.computing(name) - before
            evaluator.undo()
        if more and min(more.values()) >= 0:
            best = min(more, key=lambda fmt: more[fmt])
            numbers = {"seconds more": more[best]}
            yield PlanNote(PlanNoteKind.NOT_FASTER, name, operator, (best, requested), numbers)


def get_allocator(selected: str | Allocator) -> Allocator:
    """Return an allocator by name, or as given; raise `OptionError` for unknown names."""
    if not isinstance(selected, str):
        return selected
    if selected == "dynamic-batches":
        message = f"the allocator {selected!r} requires arguments"
        do = "give baselines.DynamicBatches(resized), or use qsync plan --compare"
        raise OptionError(message, where="allocator", do=do)
    available = allocators()
    if selected not in available:
        message = f"there is no allocator {selected[:40]!r}"
        raise OptionError(message, where="allocator", do=nearest(selected[:40], available))
    return available[selected]


@functools.cache
def allocators() -> Mapping[str, Allocator]:
    """Return the allocators without constructor arguments, by name."""
    return listed_in_modules("qsync_fx.allocator", "ALLOCATORS")


def find_plan(
    profile: Given | Mapping[str, Given],
    cluster: Cluster | Path | None = None,
    *others: Never,
    objective: str = "hybrid",
    budget: str | float | None = None,
    memory: Mapping[str, Memory] | Memory | None = None,
    target: str | float | None = None,
    allocator: str | Allocator = "milp",
    sensitivity: Sensitivity | Mapping[str, Sensitivity] | None = None,
    precisions: Sequence[str] | None = None,
    tie_blocks: bool = False,
    codecs: Sequence[str] = (),
    inside_codecs: Sequence[str] = (),
    margin: float | None = None,
    batch: Literal["global"] | tuple[int, int] | None = None,
    min_batch: int = 1,
    recompute: bool = False,
    resized: Callable[[DeviceClass, int], DeviceClass] | None = None,
    model: nn.Module | None = None,
    step: StepFunction | None = None,
    batches: Iterable[Any] = (),
    optimizer: GivenOptimizer | None = None,
    options: Mapping[str, object] | None = None,
    max_replans: int = MAX_REPLANS,
    repeats: int = TURNS,
    progress: bool = True,
) -> PlanResult:
    """Return the best plan for a model on profiled devices.

    Args:
        profile: profile of the device, or of each device class by name: a `Profile`, the path of
            its file, or `DeviceTimes` of the catalog. A list of profiles that differ only in the
            batch covers several batch sizes, as one of `measure(..., batch_sizes=...)` does.
        cluster: devices and links, or the path of their TOML file; not needed for one device.
        objective: "hybrid": least variance of the gradients with a step of at most `target`. With
            several classes, the one that computes fastest in its widest format is fixed to that
            format, unless it lacks the memory. "fastest": least seconds per
            step with at most the variance `budget`. "recover": least variance on all classes with a
            step of at most the time in mixed precision. "cost": least cost per sample with at most
            the variance `budget`, by the prices of the cluster; classes may be left out of the
            plan, and the notes contain the cost on each subset. Other names: see
            `qsync_fx.allocator.objectives`.
        budget: variance, or a format whose uniform plan defines it; for "recover", the format of
            mixed precision. Default: the widest format of each class with at most 16 bits.
        memory: limit of the peak memory of a step, of all classes or per class: bytes, "4 GB", or
            "30%" of the device memory. Default: the limits of the cluster.
        target: limit of the step in seconds, or a format whose uniform plan defines it. Default for
            "hybrid": the narrowest format of each class.
        allocator: name of an allocator, or an `Allocator`.
        sensitivity: sensitivity of the model, or per class. Default: from the profiles.
        precisions: formats that the plan may use. Default: the measured formats.
        tie_blocks: whether corresponding operators of equal blocks share one format.
        codecs: codecs for gradient buckets in addition to FP32, such as ("qsgd8", "qsgd4"). Only
            the "milp" allocator chooses them, together with the formats and equal on all ranks. The
            predicted time of a plan with codecs requires `qsync_fx.distributed.compress(ddp,
            plan)`. Default: none.
        inside_codecs: codecs inside nodes of several ranks in addition to FP32, such as ("qsgd8",),
            for buckets with a codec between nodes. A bucket with both is "qsgd4/qsgd8". Default:
            none.
        margin: relative slowdown that is assumed for devices open to choice, so that others need
            not wait when a step is slower than predicted. Default: with several classes, the spread
            of measured steps, at least 2% and at most 10%; 0 for catalog devices. Dropped if no
            plan leaves the margin.
        batch: "global" to plan the batch of each class together with the formats, with the samples
            of the cluster's batches in a step, or the least and most samples of a step. Profiles
            must cover two batch sizes, and their batch is the default of a class. The
            default `target` of "hybrid" is then the step of the narrowest formats with batches in
            proportion to speed. `PlanResult.batches` has the result. The gap assumes that a step
            with fewer samples is no slower and needs no more memory. Default: batches stay.
        min_batch: least samples per device, such as for the statistics of batch norms.
        recompute: whether classes whose memory limits the plan may recompute activations, next to
            formats and batches. `PlanResult.memory_budgets` has the result; compilation with the
            plan applies it. Peak memory and recomputed operators are predicted, not measured.
        resized: constructor of a device class with another batch, for profiles of one batch size:
            `lambda part, batch: evaluator.resized(part, graph, batch)` for the model graph with a
            symbolic batch. Its times are scaled instead of interpolated.
        model: the model, if a profiled device is this machine. The plan is then run, the profile
            corrected by the measurement and the plan computed again, until prediction and
            measurement agree. `PlanResult.trials` contains the measurements, `PlanResult.profiles`
            the corrected profiles.
        step, batches, optimizer, options: the arguments of `qsync_fx.measure` for the profile.
        max_replans: maximum number of measured rounds; 0 to run no plan.
        repeats: interleaved runs of a plan in each round.
        progress: whether to show progress.

    Raises:
        PlanError: no plan meets the limits; states the exceeded limits, the excess and a remedy.
        ProfileError: a profile is missing or lacks required data, or `model` is given and no
            profile is of this machine and model.
    """
    if callable(profile) or others:
        raise model_instead_of_profile(profile)
    fleet, available = load_device_profiles(profile, cluster)
    wishes = PlanRequest(
        objective,
        budget,
        memory,
        target,
        precisions,
        sensitivity,
        tie_blocks,
        codecs,
        margin,
        inside_codecs,
    )
    chosen = get_allocator(allocator)
    check_max_replans(max_replans)
    check_joint(batch, recompute, allocator, model)
    if batch is not None:
        fleet = with_measured_batches(fleet, available)

    def solve(available: Mapping[str, DeviceInputs]) -> PlanResult:
        if objective == "cost" and len(fleet.devices) > 1:
            return _cheapest(fleet, available, wishes, solve_on)
        return solve_on(fleet, available, wishes)

    def solve_on(
        fleet: Cluster, available: Mapping[str, DeviceInputs], wishes: PlanRequest, total: int = 0
    ) -> PlanResult:
        with announced("solving for a plan", progress):
            problem, notes = build_problem(fleet, available, wishes)
            limit, solver = wishes.seconds_limit, chosen
            budgets = BUDGETS if recompute else ()
            limited = any(part.memory is not None for part in problem.classes.values())
            if batch is None and recompute and limited:
                classes = problem.classes
                solver = JointBatches(
                    lambda name, _: classes[name], budgets=budgets, given_batches=True
                )
            if batch is not None:
                sized = class_at_batch(problem.classes, available, resized)
                samples = None if batch == "global" else batch
                if batch == "global" and total:
                    samples = total, total
                joint = JointBatches(sized, samples, min_batch, budgets=budgets)
                solver = joint
                if objective == "hybrid" and target is None:
                    limit = joint.balanced_seconds
                    problem = replace(problem, seconds=limit(problem))
            shares = margins(problem, available, wishes.margin)
            answer = with_margin(problem, shares, limit, solver)
        if not answer.fits:
            raise unfit(problem, [answer.evaluation])
        return replace(answer, notes=(*notes, *answer.notes, *diagnose(answer)))

    if model is not None and objective == "cost" and len(fleet.devices) > 1:
        message = "a plan for the least cost may leave devices out and is not run"
        raise OptionError(message, where="model", do="plan without it")
    if model is None:
        for name, value in (("step", step), ("optimizer", optimizer), ("options", options)):
            if value is not None:
                do = "give the model too, or leave this out"
                raise OptionError("there is no model to run the plan with", where=name, do=do)
        return solve(available)
    if step is None:
        do = "give step(model, batch), which returns the loss, and batches"
        message = "a step is required to run a plan, and there is none"
        raise OptionError(message, where="step", do=do)
    first, _ = first_batch(batches)
    at_hand = LocalModel(model, step, first, optimizer, options, repeats, progress)
    return settled(solve(available), available, solve, at_hand, max_replans)


def _cheapest(
    fleet: Cluster,
    available: Mapping[str, DeviceInputs],
    wishes: PlanRequest,
    solve: Callable[[Cluster, Mapping[str, DeviceInputs], PlanRequest, int], PlanResult],
) -> PlanResult:
    """Return the plan at the least cost per sample of all subsets of the device classes.

    All subsets have the variance limit of all classes. The bound of the result is the least cost
    per sample in the bounds of all subsets, as seconds of a step at the price of the result.
    """
    budget = build_problem(fleet, available, wishes)[0].variance
    results, errors = dict[tuple[str, ...], PlanResult](), list[PlanError]()
    for count in range(len(fleet.devices), 0, -1):
        for names in itertools.combinations(fleet.devices, count):
            if (part := fleet.only(names)) is None:
                continue  # the links between these ranks were not measured
            memory = wishes.memory
            if isinstance(memory, Mapping):
                memory = {name: memory[name] for name in names if name in memory}
            inputs = {name: available[name] for name in names}
            limits = replace(wishes, budget=budget, memory=memory)
            try:
                results[names] = solve(part, inputs, limits, fleet.samples or 0)
            except PlanError as error:
                errors.append(error)
    if not results:
        raise errors[0]
    notes = []
    for names, result in results.items():
        cluster = result.problem.cluster
        numbers = {
            "samples per unit of currency": result.samples_per_price or 0.0,
            "samples a second": (cluster.samples or 0) / result.evaluation.seconds,
        }
        notes.append(PlanNote(PlanNoteKind.SUBSET, " and ".join(names), numbers=numbers))
    best = max(results, key=lambda names: results[names].samples_per_price or 0.0)
    answer = results[best]
    unused = (name for name in fleet.devices if name not in best)
    notes += [PlanNote(PlanNoteKind.NOT_USED, name) for name in unused]
    rate, bound = answer.samples_per_price or 0.0, math.inf
    for result in results.values():
        cost = (result.bound or 0.0) / result.value / (result.samples_per_price or 1.0)
        bound = min(bound, cost * rate * answer.value)
    return replace(answer, bound=bound, notes=(*answer.notes, *notes))


def check_joint(
    batch: Literal["global"] | tuple[int, int] | None,
    recompute: bool = False,
    allocator: str | Allocator = "milp",
    model: nn.Module | None = None,
) -> None:
    """Raise `OptionError` for an invalid range of samples, and for arguments that contradict it or
    recomputation.
    """
    pair = isinstance(batch, tuple) and len(batch) == 2
    if batch not in (None, "global") and not (pair and all(type(item) is int for item in batch)):
        do = 'give "global", or the least and most samples of a step'
        raise OptionError(f"{shown(str(batch))} is no range of samples", where="batch", do=do)
    if batch is None and not recompute:
        return
    name = "recompute" if batch is None else "batch"
    if allocator != "milp":
        message = f"this allocator does not support {name}"
        do = f'leave the allocator out: {name} requires "milp"'
        raise OptionError(message, where="allocator", do=do)
    if model is not None:
        message = f"a plan with {name} cannot be run with the measured step"
        raise OptionError(message, where="model", do="plan without it")


def cache_plan(profile: Profile) -> pathlib.Path:
    """Find the fastest plan of a profile, save both in the cache, and return the profile's path.

    The plan has at most the variance of the default format of the device, mostly BF16. From then on
    `torch.compile(model, backend="qsync")` without a plan or a precision trains this model on this
    machine under it.

    Raises:
        ProfileError: if the profile is of another machine or of the catalog, has no sensitivity, or
            cannot be written.
        PlanError: if the profile has no format for the plan's variance.
    """
    profile.machine.check(here_for(profile.machine))
    model = profile.fingerprint
    if model is None:
        do = "measure the model with qsync_fx.measure, and save that"
        raise ProfileError("the profile has no fingerprint of its model", do=do)
    within = default_precision(torch.device(profile.machine.device)).name
    answer = find_plan(profile, objective="fastest", budget=within)
    (name,) = answer.plans
    uniform = evaluate_plan(answer.problem, answer.problem.uniform(within))
    operators = dict(answer.plans[name])
    result = CachedPlan(
        profile.machine, model, within, answer.evaluation.seconds, uniform.seconds, operators
    )
    path = folder(model.structure) / f"{_name(profile)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the profile is not saved: {error.strerror or error}"
        do = "set QSYNC_CACHE_DIR to a folder that is writable, or give a path"
        raise ProfileError(message, where=str(path.parent), do=do) from error
    profile.save(path)
    CACHED_PLAN_FILE.write(path.with_suffix(SUFFIX), CACHED_PLAN_FILE.encode(result))
    return path


def _name(profile: Profile) -> str:
    """Return a file name that is equal for profiles of one model, mode, batch and machine."""
    return hashlib.sha256(f"{profile.model.digest} {profile.machine}".encode()).hexdigest()[:16]
