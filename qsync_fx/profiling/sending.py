"""How long gradients travel between the ranks that are up, and what copying and sending them takes of a device that computes.

Invariant: such steps of the profile's widest and narrowest format are foreseen as long as they were, taken together, where some `busy`
says so.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import distributed, nn

from qsync_fx.errors import QSyncError
from qsync_fx.plan import Plan
from qsync_fx.predictor.mapper import CostMapper
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.cluster_parts import Buckets, Device, Network
from qsync_fx.predictor.replay.fleet import played
from qsync_fx.predictor.schedule import Schedule
from qsync_fx.profiling.measuring.busy import busy as beside_products, coding
from qsync_fx.profiling.measuring.collectives import buffers_seconds, collectives
from qsync_fx.profiling.measuring.steps import Training
from qsync_fx.profiling.measuring.together import Together, Unsent, together
from qsync_fx.profiling.profile import Collective, Profile

MOST: Final = 4.0
"""Times as long as they travel that messages are taken to keep a device from computing, at most."""
_NEAR: Final = 1e-3
PLANS: Final = 2
"""Under so many steps are measured, on all ranks, also on one that has a single format: they train together."""


def linked(
    profile: Profile, module: nn.Module, compiled: Callable[[nn.Module, Training, Plan], Any], training: Training
) -> list[Collective]:
    """Measures all-reduces, and steps of a model with and without them, on all ranks at once; nothing where there is one rank.

    Memory is what steps in narrow formats wait for, and what sending takes from them: the wider the format, the less is in its way.

    Args:
        profile: of this rank, without them.
        compiled: compiles a model under a plan, as `together` has it done.
        module, training: as `together` takes them.
    """
    links = collectives()
    if not links:
        return []
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    alone = replace(links[0], buffers=buffers_seconds(module), coding=coding() if on_cpu else None)

    def measured(plan: Plan) -> Together:
        return together(module, lambda wrapped, training: compiled(wrapped, training, plan), training)

    plans = [Plan.uniform(name) for name in (profile.precisions[0], profile.precisions[-1])]
    assert len(plans) == PLANS
    steps: list[tuple[Plan, Together]] = []
    why = ""
    try:
        steps = [(plan, measured(plan)) for plan in plans]
    except QSyncError:
        raise
    except Exception as error:  # noqa: BLE001 - what a user's step does with a model that DDP wraps is not foreseen
        why = str(error) or type(error).__name__
    if why:
        # What DistributedDataParallel has hung on parameters goes with the frames of that error.
        gc.collect()
        what = f"no step could be trained with gradients that are sent, of which sending takes a part ({why})"
        warnings.warn(f"{what}: products are computed beside all-reduces instead", stacklevel=2)
        return [replace(alone, busy=beside_products(alone.seconds))]
    found = taken_in_steps(profile, alone, steps)
    mean = torch.tensor(found.busy)
    distributed.all_reduce(mean)
    return [replace(found, busy=float(mean) / alone.ranks)]


def taken_in_steps(profile: Profile, alone: Collective, steps: Sequence[tuple[Plan, Together]]) -> Collective:
    """Returns with which `slowdown`, `copies` and `busy` the replayer has steps take as long as they did, all of them together.

    Args:
        profile: of this rank.
        alone: how long messages travel while nothing is computed.
        steps: of some plans.
    """
    table = [(float(nbytes), seconds) for nbytes, seconds in alone.seconds]
    known = [(CostMapper(profile.graph, profile.times(), plan).schedule(), seen) for plan, seen in steps]
    devices = [_as_slowest(schedule, seen.slowest, alone.ranks) for schedule, seen in known]

    def foreseen(busy: float) -> float:
        network = Network(all_reduce=table, ranks=alone.ranks, busy=busy)
        return sum(
            _step(schedule, seen, slowest, network) for (schedule, seen), slowest in zip(known, devices, strict=True)
        )

    slowdown = sum(seen.own.left for _, seen in known) / sum(schedule.seconds for schedule, _ in known)
    copied = max(0.0, sum(seen.own.copied - seen.own.left for _, seen in known)) / slowdown
    copies = copied / sum(2 * _nbytes(schedule) for schedule, _ in known)
    busy = busy_for(foreseen, sum(seen.sending for _, seen in known))
    return replace(alone, slowdown=slowdown, copies=copies, busy=busy)


def _as_slowest(schedule: Schedule, seen: Unsent, count: int) -> Device:
    """Returns devices that compute and copy as long as the slowest rank did that sent nothing."""
    slowdown = seen.left / schedule.seconds
    copies = max(0.0, seen.copied - seen.left) / (2 * _nbytes(schedule) * slowdown)
    return Device(count, copies=copies, slowdown=slowdown)


def _step(schedule: Schedule, seen: Together, slowest: Device, network: Network) -> float:
    """Returns the seconds of a step of such devices, in buckets as they were."""
    cluster = Cluster({"rank": slowest}, network, Buckets(seen.bucket_bytes, seen.bucket_bytes))
    return float(played({"rank": schedule}, cluster).step.seconds)


def _nbytes(schedule: Schedule) -> int:
    return sum(parameter.numel * parameter.dtype_bytes for parameter in schedule.parameters)


def busy_for(foreseen: Callable[[float], float], seconds: float) -> float:
    """Returns the least `busy`, up to `MOST`, with which steps are foreseen as long as that; what is foreseen rises with it."""
    low, high = 0.0, MOST
    while high - low > _NEAR:
        middle = (low + high) / 2
        low, high = (middle, high) if foreseen(middle) < seconds else (low, middle)
    return high if low > 0 else 0.0
