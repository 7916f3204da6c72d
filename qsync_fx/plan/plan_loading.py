"""Who this process is among those that train together: its rank, and what its device is called.

Invariant: nothing is decided here, and nothing is waited for. A process that torch.distributed knows has the rank that it has there; one
that a launcher such as torchrun has started, and that has not joined yet, the rank that the launcher gave it.

Files of plans, where a file may hold one plan or one for a cluster.

Invariant: what the file says that it is, is what it is read as, with all of that kind's checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import torch
from torch import distributed

from qsync_fx import environment
from qsync_fx.errors import PlanError
from qsync_fx.plan.cluster_plan import ClusterPlan, LocalPlan
from qsync_fx.plan.plan import Plan
from qsync_fx.plan.plan_file import CLUSTER_PLAN, PLAN
from qsync_fx.serialization.schema import Path


@runtime_checkable
class HoldsPlan(Protocol):
    """What an allocator's answer is, and anything else that a plan was found with."""

    def as_plan(self) -> Plan | ClusterPlan:
        """Returns the plan."""


def given_plan(value: object) -> object:
    """Returns the plan that an allocator's answer holds; what is none, as it is."""
    return value.as_plan() if isinstance(value, HoldsPlan) else value


def device_plans(value: Plan | HoldsPlan | Sequence[Plan | HoldsPlan]) -> list[Plan]:
    """Returns the plans of one device, or the one, that are given; raises `PlanError` for what is none."""
    several = [value] if isinstance(value, Plan | ClusterPlan | HoldsPlan) else value
    return [_device_plan(given_plan(item)) for item in several]


def _device_plan(value: object) -> Plan:
    if isinstance(value, Plan):
        return value
    cluster = isinstance(value, ClusterPlan)
    do = "give the plan of one of its classes: plan.for_class(name)" if cluster else "give a Plan"
    message = f"what was given is of type {type(value).__name__}, and no plan of a device"
    raise PlanError(message, where="plan", do=do)


def read_plan(path: Path) -> Plan | ClusterPlan:
    """Reads a file that may come from anywhere; raises `PlanError` saying what is wrong with it, and where."""
    data = CLUSTER_PLAN.read(path)
    try:
        large = len(data) > PLAN.largest
        text = (CLUSTER_PLAN if large else PLAN).parsed(data)
        if CLUSTER_PLAN.is_named_in(text):
            return ClusterPlan.from_json(text)
        return Plan.from_json(data if large else text)
    except PlanError as error:
        raise PLAN.within(path, error) from None


DEVICE_CLASS: Final = "QSYNC_DEVICE_CLASS"
"""The environment variable that names the class of this process's device."""


def this_process() -> LocalPlan:
    """Returns what this process knows of itself."""
    rank, world = _rank_and_world()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return LocalPlan(rank, world, device)


def named_class() -> str | None:
    """Returns the class of this process's device that its environment names; None where it names none."""
    return environment.text(DEVICE_CLASS) or None


def part_of_this_process(plan: Plan | ClusterPlan, device_class: str | None = None) -> Plan:
    """Returns the plan that a rank trains under, of one for it or for a cluster.

    Args:
        plan: of which a part is taken, where it is for a cluster.
        device_class: the class whose part it is; None to have it found.

    Raises:
        PlanError: which part is this rank's cannot be told.
    """
    if isinstance(plan, Plan):
        if device_class is not None:
            message = f"the plan has no parts, of which {device_class!r} could name one"
            raise PlanError(
                message,
                where='option "device_class"',
                do="leave the option out, or give a plan for a cluster",
            )
        return plan
    if device_class is not None:
        return plan.for_class(device_class, 'the option "device_class"')
    if named := named_class():
        return plan.for_class(named, f"the environment variable {DEVICE_CLASS}")
    return plan.for_process(this_process())


def _rank_and_world() -> tuple[int | None, int | None]:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = environment.launcher_number("RANK"), environment.launcher_number("WORLD_SIZE")
    return (None, None) if rank is None or world is None else (rank, world)
