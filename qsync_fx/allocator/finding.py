"""`qsync_fx.find_plan`: from profiles and a cluster to a plan.

Invariant: the plan keeps every limit that was asked for, by the judge, or there is an error that says which cannot be kept. What an answer
says beyond its plan, about limits, devices and operators, is figured out from plans that were judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from qsync_fx.allocator.answer import Allocator, Answer
from qsync_fx.allocator.asking import Objective, Wishes, problem_of, target_of
from qsync_fx.allocator.known import allocator_of
from qsync_fx.allocator.looking import looked
from qsync_fx.allocator.margins import margins, with_margin
from qsync_fx.allocator.rounds import CORRECTIONS, TURNS, AtHand, check_corrections, settled
from qsync_fx.allocator.unfit import unfit
from qsync_fx.codec import Path
from qsync_fx.errors import OptionError
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.memory_size import Memory
from qsync_fx.predictor.sensitivity.value import Sensitivity
from qsync_fx.profiling.given import GivenOptimizer
from qsync_fx.profiling.measuring.steps import StepFunction, first_batch
from qsync_fx.timeline.known import Given, Known, known_devices


def find_plan(
    profile: Given | Mapping[str, Given],
    cluster: Cluster | Path | None = None,
    *,
    objective: Objective = "hybrid",
    budget: str | float | None = None,
    memory: Mapping[str, Memory] | Memory | None = None,
    target: str | float | None = None,
    allocator: str | Allocator = "exact",
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
    corrections: int = CORRECTIONS,
    rounds: int = TURNS,
    progress: bool = True,
) -> Answer:
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
            all ranks, by the "exact" allocator alone. None by default: a plan that has codecs is one to train under with
            `qsync_fx.distributed.compress(ddp, plan)`, and without that would not take the seconds that it says.
        margin: the share by which devices that plans are chosen for are planned on as slower than they are, so that others need not wait
            where a step takes longer than is foreseen. By default, of several classes, what is uncertain of a profile: how far its steps
            differ, 2% at least; nothing of the catalog's. Where no plan leaves it, none is left.
        model: the model itself, where the device that a profile was measured on is at hand. Then the plan is run, the profile corrected by
            what was measured, and the plan looked for again, until what is foreseen and what is measured agree. `Answer.trials` says what
            came out, `Answer.profiles` has the profile as corrected.
        step, batches, optimizer, options: as `qsync_fx.measure` was given them for the profile.
        corrections: how often at most that is done; 0 to leave it.
        rounds: how many turns a plan has each time.
        progress: whether to show how far that is.

    Raises:
        PlanError: no plan keeps the limits; says which of them, by how much, and what would do.
        ProfileError: a profile is missing, or does not say what is needed of it; none is of this machine and model, which are at hand.
    """
    fleet, known = known_devices(profile, cluster)
    wishes = Wishes(objective, budget, memory, target, precisions, sensitivity, tie_blocks, codecs, margin)
    chosen = allocator_of(allocator)
    check_corrections(corrections)

    def solve(known: Mapping[str, Known]) -> Answer:
        problem, notes = problem_of(fleet, known, wishes)
        shares = margins(problem, known, wishes.margin)
        answer = with_margin(problem, shares, lambda slower: target_of(slower, wishes), chosen)
        if not answer.fits:
            raise unfit(problem, [answer.judged])
        return replace(answer, notes=(*notes, *answer.notes, *looked(answer)))

    if model is None:
        for name, value in (("step", step), ("optimizer", optimizer), ("options", options)):
            if value is not None:
                do = "give the model too, and the plan is run with it; or leave this out"
                raise OptionError("there is no model to run the plan with", where=name, do=do)
        return solve(known)
    if step is None:
        do = "give step(model, batch), which returns the loss, and batches"
        raise OptionError("a plan is run by a step, and there is none", where="step", do=do)
    first, _ = first_batch(batches)
    at_hand = AtHand(model, step, first, optimizer, options, rounds, progress)
    return settled(solve(known), known, solve, at_hand, corrections)
