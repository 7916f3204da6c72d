"""`qsync_fx.find_plan`: from profiles and a cluster to a plan.

Invariant: the plan keeps every limit that was asked for, by the judge, or there is an error that says which cannot be kept. What an answer
says beyond its plan, about limits, devices and operators, is figured out from plans that were judged.

What there is to know about a plan that was found: limits that bind, operators that stay wide, devices that do not help.

Invariant: says what the judge says of plans beside the one that was found.

The allocators by name.

Invariant: an allocator is imported when it is asked for.

A profile in the cache, with the plan that its model trains under from then on where none is asked for.

Invariant: the plan is written after the profile that it was found from, so that a plan that is there has one.
"""

from __future__ import annotations

import hashlib
import importlib
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from qsync_fx.allocator.evaluator import PlanEvaluator, evaluate_plan
from qsync_fx.allocator.feasibility import margins, unfit, with_margin
from qsync_fx.allocator.measure_and_replan import (
    MAX_REPLANS,
    TURNS,
    LocalModel,
    check_max_replans,
    settled,
)
from qsync_fx.allocator.plan_result import Allocator, PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Problem, width
from qsync_fx.allocator.problem_builder import Objective, PlanRequest, build_problem, target_of
from qsync_fx.communication.codec_cost_model import by_bucket
from qsync_fx.devices.format_support import default_precision
from qsync_fx.devices.machine import here_for
from qsync_fx.errors import OptionError, ProfileError, nearest
from qsync_fx.plan_cache import KEPT, SUFFIX, CachedPlan, folder
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from qsync_fx.predictor.replayer.cluster import Cluster, Memory
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.profiler.measurement import GivenOptimizer
from qsync_fx.profiler.timing.step_timers import StepFunction, first_batch
from qsync_fx.serialization.schema import Path
from qsync_fx.timeline.device_profiles import DeviceInputs, Given, load_device_profiles

if TYPE_CHECKING:
    from qsync_fx.profiler.profile import Profile


NEAR: Final = 0.02
"""How near to a limit, of it, a plan is that the limit binds."""
LONG: Final = 0.1
"""Of a step, how long a device waits for gradients that this is worth a word."""


def diagnose(answer: PlanResult) -> Iterator[PlanNote]:
    """Yields what there is to know."""
    judge = PlanEvaluator(answer.problem, answer.plans, answer.judged.codecs)
    yield from _binding(answer)
    yield from _waiting(answer)
    if answer.codecs and (size := answer.problem.cluster.nodes.ranks) > 1:
        yield PlanNote(PlanNoteKind.BETWEEN_NODES, numbers={"ranks a node": float(size)})
    yield from _joining(answer, judge)
    for name in answer.problem.open:
        yield from _not_faster(answer, judge, name)


def _binding(answer: PlanResult) -> Iterator[PlanNote]:
    """The limits that the plan comes near to, where there is anything to win beyond them."""
    problem, judged = answer.problem, answer.judged
    if problem.least == "variance" and not any(
        judged.classes[name].variance for name in problem.open
    ):
        return
    values = [
        ("", "seconds", judged.seconds, problem.seconds),
        ("", "variance", judged.variance, problem.variance),
    ]
    for name in problem.open:
        values.append(
            (
                name,
                "memory",
                float(judged.classes[name].peak_bytes or 0),
                problem.classes[name].memory,
            )
        )
    for name, subject, value, limit in values:
        if limit and value > limit * (1 - NEAR):
            yield PlanNote(PlanNoteKind.BINDS, name, numbers={subject: value, "limit": limit})


def _waiting(answer: PlanResult) -> Iterator[PlanNote]:
    """The classes that wait for gradients to travel, where no codecs were allowed, and any could win."""
    cluster = answer.problem.cluster
    if answer.problem.coding is not None or cluster.ranks == cluster.nodes.ranks:
        return
    for name, figures in answer.judged.classes.items():
        if figures.sending > LONG * answer.judged.seconds:
            yield PlanNote(
                PlanNoteKind.WAITS,
                name,
                numbers={"seconds": figures.sending, "of a step of": answer.judged.seconds},
            )


def _joining(answer: PlanResult, judge: PlanEvaluator) -> Iterator[PlanNote]:
    """Whether the run makes more samples a second with each class than without it, taking batches to be equal where none is known."""
    problem = answer.problem
    if len(problem.classes) == 1:
        return
    rate = _samples(problem, list(problem.classes)) / answer.judged.seconds
    for name in problem.open:
        others = [other for other in problem.classes if other != name]
        if (
            sum(problem.cluster.devices[other].count for other in others)
            % problem.cluster.nodes.ranks
        ):
            continue  # they make no whole nodes, and between what others are nothing was measured
        alone = replace(
            problem.cluster, devices={other: problem.cluster.devices[other] for other in others}
        )
        owned = {other: judge.schedules()[other] for other in others}
        coding = problem.coding
        settings = None if coding is None else by_bucket(owned, alone, answer.codecs, coding.rates)
        seconds = float(simulate(owned, alone, settings).step.seconds)
        without = _samples(problem, others) / seconds
        kind = PlanNoteKind.JOINS if rate > without else PlanNoteKind.DOES_NOT_HELP
        yield PlanNote(kind, name, numbers={"samples a second": rate, "without it": without})


def _samples(problem: Problem, names: list[str]) -> float:
    devices = problem.cluster.devices
    available = all(device.batch is not None for device in devices.values())
    return float(
        sum(
            devices[name].count * ((devices[name].batch or 1) if available else 1) for name in names
        )
    )


def _not_faster(answer: PlanResult, judge: PlanEvaluator, name: str) -> Iterator[PlanNote]:
    """The operators that keep a wider format where no narrower one is faster on this device."""
    part, before = answer.problem.classes[name], judge.computing(name)
    for operator, requested in answer.plans[name].items():
        narrower = [fmt for fmt in part.choices[operator] if width(fmt) < width(requested)]
        more = {}
        for fmt in narrower:
            judge.set(name, operator, fmt)
            more[fmt] = judge.computing(name) - before
            judge.undo()
        if more and min(more.values()) >= 0:
            best = min(more, key=lambda fmt: more[fmt])
            yield PlanNote(
                PlanNoteKind.NOT_FASTER,
                name,
                operator,
                (best, requested),
                {"seconds more": more[best]},
            )


HOMES: Final[dict[str, tuple[str, str]]] = {
    "milp": ("qsync_fx.allocator.milp.milp_allocator", "MilpAllocator"),
    "paper": ("qsync_fx.allocator.recovery", "PrecisionRecovery"),
    "uniform": ("qsync_fx.allocator.baselines", "Uniform"),
    "full-precision": ("qsync_fx.allocator.baselines", "FullPrecision"),
    "random": ("qsync_fx.allocator.baselines", "RandomGreedy"),
}
"""By name, the module and the class. Allocators that take something more to be made are not among them."""
MADE: Final[dict[str, tuple[str, str]]] = {
    "hessian": (
        "the curvature of each operator",
        'give qsync_fx.allocator.baselines.HessianGreedy(qsync_fx.sensitivity(..., method="hessian")), or qsync plan --compare --hessian',
    ),
    "dynamic-batches": (
        "the model with other batches, and makes plans for those",
        "give qsync_fx.allocator.baselines.DynamicBatches(resized), or see qsync plan MODULE:CALLABLE --compare",
    ),
}
"""Those, by name: what each takes, and how it is had."""


def get_allocator(selected: str | Allocator) -> Allocator:
    """Returns an allocator, which may be given by name; raises `OptionError` where there is none."""
    if not isinstance(selected, str):
        return selected
    if selected in MADE:
        subject, do = MADE[selected]
        raise OptionError(
            f"the allocator {selected!r} takes {subject} to be made", where="allocator", do=do
        )
    if selected not in HOMES:
        raise OptionError(
            f"there is no allocator {selected[:40]!r}",
            where="allocator",
            do=nearest(selected[:40], HOMES),
        )
    module, name = HOMES[selected]
    return _made(module, name)


def allocators() -> dict[str, Allocator]:
    """Returns the allocators that take any problem, by name."""
    return {selected: _made(*home) for selected, home in HOMES.items()}


def _made(module: str, name: str) -> Allocator:
    result: Allocator = getattr(importlib.import_module(module), name)()
    return result


def find_plan(
    profile: Given | Mapping[str, Given],
    cluster: Cluster | Path | None = None,
    *,
    objective: Objective = "hybrid",
    budget: str | float | None = None,
    memory: Mapping[str, Memory] | Memory | None = None,
    target: str | float | None = None,
    allocator: str | Allocator = "milp",
    sensitivity: Sensitivity | Mapping[str, Sensitivity] | None = None,
    precisions: Sequence[str] | None = None,
    tie_blocks: bool = False,
    codecs: Sequence[str] = (),
    margin: float | None = None,
    model: nn.Module | None = None,
    step: StepFunction | None = None,
    batches: Iterable[Any] = (),
    optimizer: GivenOptimizer | None = None,
    options: Mapping[str, object] | None = None,
    max_replans: int = MAX_REPLANS,
    repeats: int = TURNS,
    progress: bool = True,
) -> PlanResult:
    """Returns the plan that is best for a model on devices of which profiles are at hand.

    Args:
        profile: of the device, or of each class of devices by name: a `Profile`, the path of its file, or `DeviceTimes` of the catalog.
        cluster: devices and links, or the path of a file of TOML that says them; not needed for one device.
        objective: "hybrid", the least variance of gradients at which a step takes no longer than `target`, where the quickest of several
            classes trains in its widest format; "fastest", the least seconds at no more variance than `budget`; "recover", the least
            variance on all classes at which a step takes no longer than in mixed precision.
        budget: of variance, or the format of the uniform plan that has it; for "recover", the format of mixed precision. By default the
            widest that each class has of 16 bits or fewer.
        memory: what a step may take, of all classes or of each: bytes, "4 GB", or "30%" of what the device has. By default what the
            cluster says.
        target: seconds that a step may take, or the format of the uniform plan that takes them; by default, for "hybrid", the narrowest of
            each class.
        allocator: what chooses; a name, or an `Allocator`.
        sensitivity: of the model, or of each class; by default what profiles hold.
        precisions: formats that the plan may ask for; by default those that were measured.
        tie_blocks: whether operators at one place of equal blocks get one format.
        codecs: what a bucket of gradients may be sent in beside FP32, such as ("qsgd8", "qsgd4"): chosen together with formats, the same on
            all ranks, by the "milp" allocator alone. None by default: a plan that has codecs is one to train under with
            `qsync_fx.distributed.compress(ddp, plan)`, and without that would not take the seconds that it says.
        margin: the share by which devices that plans are chosen for are planned on as slower than they are, so that others need not wait
            where a step takes longer than is foreseen. By default, of several classes, what is uncertain of a profile: how far its steps
            differ, 2% at least; nothing of the catalog's. Where no plan leaves it, none is left.
        model: the model itself, where the device that a profile was measured on is at hand. Then the plan is run, the profile corrected by
            what was measured, and the plan looked for again, until what is foreseen and what is measured agree. `PlanResult.trials` says
            what
            came out, `PlanResult.profiles` has the profile as corrected.
        step, batches, optimizer, options: as `qsync_fx.measure` was given them for the profile.
        max_replans: how often at most that is done; 0 to leave it.
        repeats: how many turns a plan has each time.
        progress: whether to show how far that is.

    Raises:
        PlanError: no plan keeps the limits; says which of them, by how much, and what would do.
        ProfileError: a profile is missing, or does not say what is needed of it; none is of this machine and model, which are at hand.
    """
    fleet, available = load_device_profiles(profile, cluster)
    wishes = PlanRequest(
        objective, budget, memory, target, precisions, sensitivity, tie_blocks, codecs, margin
    )
    chosen = get_allocator(allocator)
    check_max_replans(max_replans)

    def solve(available: Mapping[str, DeviceInputs]) -> PlanResult:
        problem, notes = build_problem(fleet, available, wishes)
        shares = margins(problem, available, wishes.margin)
        answer = with_margin(problem, shares, lambda slower: target_of(slower, wishes), chosen)
        if not answer.fits:
            raise unfit(problem, [answer.judged])
        return replace(answer, notes=(*notes, *answer.notes, *diagnose(answer)))

    if model is None:
        for name, value in (("step", step), ("optimizer", optimizer), ("options", options)):
            if value is not None:
                do = "give the model too, and the plan is run with it; or leave this out"
                raise OptionError("there is no model to run the plan with", where=name, do=do)
        return solve(available)
    if step is None:
        do = "give step(model, batch), which returns the loss, and batches"
        raise OptionError("a plan is run by a step, and there is none", where="step", do=do)
    first, _ = first_batch(batches)
    at_hand = LocalModel(model, step, first, optimizer, options, repeats, progress)
    return settled(solve(available), available, solve, at_hand, max_replans)


def cache_plan(profile: Profile) -> pathlib.Path:
    """Find the fastest plan of a profile, and save both in the cache; return the path of the profile.

    The plan has at most the variance of the default format of the device, mostly BF16. From then on
    `torch.compile(model, backend="qsync")` without a plan or a precision trains this model on this machine under it.

    Args:
        profile: of `qsync_fx.measure`, with sensitivity.

    Raises:
        ProfileError: if the profile is of another machine or of the catalog, has no sensitivity, or cannot be written.
        PlanError: if the profile has no format for the plan's variance.
    """
    profile.machine.check(here_for(profile.machine))
    model = profile.fingerprint
    if model is None:
        do = "measure the model with qsync_fx.measure, and save that"
        raise ProfileError(
            "the profile does not say by what its model is known when it is compiled", do=do
        )
    within = default_precision(torch.device(profile.machine.device)).name
    answer = find_plan(profile, objective="fastest", budget=within)
    (name,) = answer.plans
    uniform = evaluate_plan(answer.problem, answer.problem.uniform(within))
    operators = dict(answer.plans[name])
    result = CachedPlan(
        profile.machine, model, within, answer.judged.seconds, uniform.seconds, operators
    )
    path = folder(model.structure) / f"{_name(profile)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"the profile is not saved: {error.strerror or error}"
        do = "set QSYNC_CACHE_DIR to a folder that is writable, or give a path"
        raise ProfileError(message, where=str(path.parent), do=do) from error
    profile.save(path)
    KEPT.write(path.with_suffix(SUFFIX), KEPT.encode(result))
    return path


def _name(profile: Profile) -> str:
    """Returns what the profile is called, as is any other of this model in this mode, with this batch and on this machine."""
    return hashlib.sha256(f"{profile.model.digest} {profile.machine}".encode()).hexdigest()[:16]
