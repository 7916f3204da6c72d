"""Files of plans, where a file may hold one plan or one for a cluster.

Invariant: what the file says that it is, is what it is read as, with all of that kind's checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from qsync_fx.codec import Path
from qsync_fx.errors import PlanError
from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.plan import Plan
from qsync_fx.plan.plan_file import CLUSTER_PLAN, PLAN


@runtime_checkable
class HoldsPlan(Protocol):
    """What an allocator's answer is, and anything else that a plan was found with."""

    def as_plan(self) -> Plan | ClusterPlan:
        """Returns the plan."""


def given_plan(given: object) -> object:
    """Returns the plan that an allocator's answer holds; what is none, as it is."""
    return given.as_plan() if isinstance(given, HoldsPlan) else given


def device_plans(given: Plan | HoldsPlan | Sequence[Plan | HoldsPlan]) -> list[Plan]:
    """Returns the plans of one device, or the one, that are given; raises `PlanError` for what is none."""
    several = [given] if isinstance(given, Plan | ClusterPlan | HoldsPlan) else given
    return [_device_plan(given_plan(one)) for one in several]


def _device_plan(given: object) -> Plan:
    if isinstance(given, Plan):
        return given
    cluster = isinstance(given, ClusterPlan)
    do = "give the plan of one of its classes: plan.for_class(name)" if cluster else "give a Plan"
    what = f"what was given is of type {type(given).__name__}, and no plan of a device"
    raise PlanError(what, where="plan", do=do)


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
