"""How long gradients travel between the ranks that are up, and what sending them takes of a device that computes.

Invariant: such steps of the profile's widest and narrowest format are foreseen as long as they were in the mean, where some `busy` says so.
"""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable
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
from qsync_fx.profiling.measuring.busy import busy
from qsync_fx.profiling.measuring.collectives import collectives
from qsync_fx.profiling.measuring.steps import Training
from qsync_fx.profiling.measuring.together import Together, together
from qsync_fx.profiling.profile import Collective, Profile

MOST: Final = 4.0
"""Times as long as they travel that messages are taken to keep a device from computing, at most."""
_NEAR: Final = 1e-3


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
    found = collectives()
    if not found:
        return []
    (alone,) = found

    def measured(plan: Plan) -> float:
        steps = together(module, lambda wrapped, passes: compiled(wrapped, passes, plan), training)
        return busy_in_steps(profile, alone, steps, plan)

    own, why = 0.0, ""
    try:
        # Two on all ranks, also on one that has a single format: they train together.
        own = statistics.mean(measured(Plan.uniform(name)) for name in (profile.precisions[0], profile.precisions[-1]))
    except QSyncError:
        raise
    except Exception as error:  # noqa: BLE001 - what a user's step does with a model that DDP wraps is not foreseen
        why = str(error) or type(error).__name__
    if why:
        # What DistributedDataParallel has hung on parameters goes with the frames of that error.
        gc.collect()
        what = f"no step could be trained with gradients that are sent, of which sending takes a part ({why})"
        warnings.warn(f"{what}: products are computed beside all-reduces instead", stacklevel=2)
        return [replace(alone, busy=busy(alone.seconds))]
    mean = torch.tensor(own)
    distributed.all_reduce(mean)
    return [replace(alone, busy=float(mean) / alone.ranks)]


def busy_in_steps(profile: Profile, collective: Collective, steps: Together, plan: Plan) -> float:
    """Returns `busy` with which the replayer has the steps of a plan take as long as they did.

    Args:
        profile: of this rank.
        collective: how long messages travel alone.
    """
    schedule = replace(CostMapper(profile.graph, profile.times(), plan).schedule(), optimizer=0.0)
    device = Device(count=collective.ranks, copies=0.0, slowdown=steps.apart / schedule.seconds)
    table = [(float(nbytes), seconds) for nbytes, seconds in collective.seconds]
    buckets = Buckets(steps.bucket_bytes, steps.bucket_bytes)

    def foreseen(busy: float) -> float:
        network = Network(all_reduce=table, ranks=collective.ranks, busy=busy)
        return float(played({"rank": schedule}, Cluster({"rank": device}, network, buckets)).step.seconds)

    return busy_for(foreseen, steps.sending)


def busy_for(foreseen: Callable[[float], float], seconds: float) -> float:
    """Returns the least `busy`, up to `MOST`, with which steps are foreseen as long as that; what is foreseen rises with it."""
    low, high = 0.0, MOST
    while high - low > _NEAR:
        middle = (low + high) / 2
        low, high = (middle, high) if foreseen(middle) < seconds else (low, middle)
    return high if low > 0 else 0.0
