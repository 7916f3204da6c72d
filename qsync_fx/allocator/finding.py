"""`qsync_fx.find_plan`: from profiles and a cluster to a plan.

Invariant: the plan keeps every limit that was asked for, by the judge, or there is an error that says which cannot be kept. What an answer
says beyond its plan, about limits, devices and operators, is figured out from plans that were judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsync_fx.allocator.answer import Allocator, Answer
from qsync_fx.allocator.asking import Memory, Objective, Wishes, problem_of
from qsync_fx.allocator.known import allocator_of
from qsync_fx.allocator.looking import looked
from qsync_fx.codec import Path
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.sensitivity.value import Sensitivity
from qsync_fx.timeline.known import Given, known_devices


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

    Raises:
        PlanError: no plan keeps the limits; says which of them, by how much, and what would do.
        ProfileError: a profile is missing, or does not say what is needed of it.
    """
    fleet, known = known_devices(profile, cluster)
    wishes = Wishes(objective, budget, memory, target, precisions, sensitivity, tie_blocks)
    problem, notes = problem_of(fleet, known, wishes)
    answer = allocator_of(allocator).allocate(problem)
    return replace(answer, notes=(*notes, *answer.notes, *looked(answer)))
