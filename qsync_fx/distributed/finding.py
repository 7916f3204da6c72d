"""`find_plan` for ranks that are up: each measures itself, rank 0 chooses, and all get the plan for the cluster.

Invariant: all ranks return the same plan, with the class of each rank in its table, or all raise: an error of one is told on all of them.
While a rank measures itself, and while rank 0 chooses, no other is in a collective, so that it hears of an error at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from qsync_fx.allocator.asking import Memory, Objective
from qsync_fx.allocator.finding import find_plan as find_plan_of_profiles
from qsync_fx.devices import names
from qsync_fx.distributed import statements
from qsync_fx.distributed.meeting import COMPILING, Meeting, several_ranks
from qsync_fx.plan import ClusterPlan
from qsync_fx.plan.cluster_plan import is_called
from qsync_fx.precision import Precision
from qsync_fx.predictor.replay.cluster import Cluster, Device
from qsync_fx.profiling.collectives import collectives
from qsync_fx.profiling.measurement import measure
from qsync_fx.profiling.profile import PROFILE, Profile
from qsync_fx.profiling.steps import StepFunction
from qsync_fx.this_process import named_class, this_process


def find_plan(
    model: nn.Module,
    step: StepFunction,
    batches: Iterable[Any],
    *,
    optimizer: Optimizer | None = None,
    device_class: str | None = None,
    objective: Objective = "hybrid",
    budget: str | float | None = None,
    memory: Mapping[str, Memory] | Memory | None = None,
    target: str | float | None = None,
    precisions: Sequence[str | Precision] | None = None,
    compiling: float = COMPILING,
    silence: float | None = None,
    progress: bool = True,
    **measuring: Any,
) -> ClusterPlan:
    """Returns the plan that is best for the ranks that are up; every rank calls it, after `init_process_group`, with the model as written.

    Args:
        model, step, batches, optimizer: as `qsync_fx.measure` takes them.
        device_class: what the class of this rank's device is called; by default by the environment variable QSYNC_DEVICE_CLASS, or after
            the device. Ranks of one class get one plan.
        objective, budget, memory, target: as `qsync_fx.find_plan` takes them, classes by these names. Rank 0's count.
        precisions: formats to measure, and to choose from.
        compiling, silence: seconds that a rank may take to measure, and say nothing, as of a guard.
        progress: whether rank 0 shows how far it is.
        measuring: what else `qsync_fx.measure` takes.

    Raises:
        RankError: another rank has failed, or has another model.
        QSyncError: this one has: it cannot be measured, or no plan keeps the limits.
    """
    mine = device_class or named_class() or _class_of(this_process().device)
    wishes = {"objective": objective, "budget": budget, "memory": memory, "target": target}
    if not several_ranks():
        profile = measure(model, step, batches, precisions, optimizer=optimizer, progress=progress, **measuring)
        return _chosen([mine], [profile], wishes)
    with Meeting(compiling, silence, collectives=False) as meeting:

        def watched(module: Any, batch: Any) -> Tensor:
            meeting.check()
            return step(module, batch)

        meeting.agree("models", statements.of_model(model), statements.REMEDIES)
        how = {"optimizer": optimizer, "progress": progress and meeting.rank == 0, "all_reduce": False}
        profile = measure(model, watched, batches, precisions, **{**measuring, **how})
        # All are here before any of them waits for another in a collective.
        meeting.agree("measurements", {}, {}, patient=True)
        profile = replace(profile, collectives=collectives())
        meeting.put("class", mine)
        meeting.put("profile", profile.to_json())
        if meeting.rank == 0:
            classes = [meeting.get("class", rank, compiling) for rank in range(meeting.world)]
            profiles = [PROFILE.decode(meeting.get("profile", rank, compiling)) for rank in range(meeting.world)]
            meeting.put("plan", _chosen(classes, profiles, wishes).to_json())
        found = ClusterPlan.from_json(meeting.get("plan", 0, compiling))
        meeting.agree("plans", {"plan": [found.to_json()]}, {})
        return found


def _chosen(classes: Sequence[str], profiles: Sequence[Profile], wishes: Mapping[str, Any]) -> ClusterPlan:
    """Returns the plan for ranks of these classes, each measured by itself; the slowest of a class speaks for it."""
    slowest: dict[str, Profile] = {}
    for name, profile in zip(classes, profiles, strict=True):
        if name not in slowest or _seconds(profile) > _seconds(slowest[name]):
            slowest[name] = profile
    counts = Counter(classes)
    cluster = Cluster({name: Device(counts[name]) for name in slowest})  # its links are what the profiles measured
    answer = find_plan_of_profiles(slowest, cluster, **wishes)
    return ClusterPlan(answer.to_plans(), ranks=classes, notes={"answer": str(answer)})


def _class_of(device: str) -> str:
    """Returns the name of a device in the catalog, or what it is called."""
    return max((name for name in names() if is_called(device, name)), key=len, default=device)


def _seconds(profile: Profile) -> float:
    return sum(sum(step) for step in profile.runs[0].steps) / len(profile.runs[0].steps)
