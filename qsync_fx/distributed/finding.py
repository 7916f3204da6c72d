"""`find_plan` for ranks that are up: each measures itself, rank 0 chooses, and all get the plan for the cluster.

Invariant: all ranks return the same plan, with the class of each rank in its table, or all raise: an error of one is told on all of them.
While a rank measures itself, and while rank 0 chooses, no other is in a collective, so that it hears of an error at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from qsync_fx.allocator.asking import Memory, Objective
from qsync_fx.codec import Path
from qsync_fx.devices import names
from qsync_fx.distributed import statements
from qsync_fx.distributed.meeting import COMPILING, Meeting, several_ranks
from qsync_fx.distributed.survey import FoundPlan, Survey
from qsync_fx.plan import ClusterPlan
from qsync_fx.plan.cluster_plan import is_called
from qsync_fx.precision import Precision
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
    save: Path | None = None,
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
        objective, budget, memory, target: as `qsync_fx.find_plan` takes them, classes by these names. Rank 0's count.
        precisions: formats to measure, and to choose from.
        save: the file that rank 0 writes the plan to.
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
        return _chosen([mine], [profile], wishes, save)
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
            chosen = _chosen(classes, profiles, wishes, save)
            meeting.put("plan", chosen.to_json())
        found = ClusterPlan.from_json(meeting.get("plan", 0, compiling))
        meeting.agree("plans", {"plan": [found.to_json()]}, {})
        return chosen if meeting.rank == 0 else FoundPlan(found)


def _chosen(
    classes: Sequence[str], profiles: Sequence[Profile], wishes: Mapping[str, Any], save: Path | None
) -> FoundPlan:
    """Returns the plan for ranks of these classes, each measured by itself; writes it where that is wished."""
    survey = Survey.of(classes, profiles, wishes)
    found = FoundPlan.of(survey.answer(), survey)
    if save is not None:
        found.save(save)
    return found


def _class_of(device: str) -> str:
    """Returns the name of a device in the catalog, or what it is called."""
    return max((name for name in names() if is_called(device, name)), key=len, default=device)
