"""Loading of plans: a file of either kind, and the part of a cluster plan for this process.

A file is read as the kind that it declares, with that kind's checks. The rank is
torch.distributed's, or before initialization the launcher's (torchrun). Reading it involves no
communication.
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
    """Protocol of values that contain a plan, such as an allocator's result."""

    def as_plan(self) -> Plan | ClusterPlan:
        """Return the plan."""


def given_plan(value: object) -> object:
    """Return the plan of a value that contains one, and any other value unchanged."""
    return value.as_plan() if isinstance(value, HoldsPlan) else value


def device_plans(value: Plan | HoldsPlan | Sequence[Plan | HoldsPlan]) -> list[Plan]:
    """Return one or several plans of a device as a list; raise `PlanError` for any other value."""
    several = [value] if isinstance(value, Plan | ClusterPlan | HoldsPlan) else value
    return [_device_plan(given_plan(item)) for item in several]


def _device_plan(value: object) -> Plan:
    if isinstance(value, Plan):
        return value
    cluster = isinstance(value, ClusterPlan)
    raise PlanError(
        f"a value of type {type(value).__name__} is not a plan for one device",
        where="plan",
        do="pass the plan of one class: plan.for_class(name)" if cluster else "pass a Plan",
    )


def read_plan(path: Path) -> Plan | ClusterPlan:
    """Read an untrusted plan file; raise `PlanError` with the problem and its location."""
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
"""Environment variable with the class of this process's device."""


def this_process() -> LocalPlan:
    """Return rank, world size and device name of this process."""
    rank, world = _rank_and_world()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return LocalPlan(rank, world, device)


def named_class() -> str | None:
    """Return the device class that the environment names, or None."""
    return environment.text(DEVICE_CLASS) or None


def part_of_this_process(plan: Plan | ClusterPlan, device_class: str | None = None) -> Plan:
    """Return the plan for this process.

    Args:
        plan: a plan, returned unchanged, or a cluster plan.
        device_class: class of the part; None to determine it from environment, rank and device.

    Raises:
        PlanError: the class is unknown or ambiguous, or `plan` has no classes.
    """
    if isinstance(plan, Plan):
        if device_class is not None:
            raise PlanError(
                f"the plan has no class {device_class!r}: it is not a plan for a cluster",
                where='option "device_class"',
                do="remove the option, or use a plan for a cluster",
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
