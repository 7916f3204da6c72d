"""How long gradients travel between the ranks that are up, and what copying, sending and coding them takes of a device that computes.

Invariant: such steps of the profile's widest and narrowest format are foreseen as long as they were, taken together, where some `busy`
says so, and with gradients in a codec where some `coding` does.

How fast this processor, or its GPU, writes and reads gradients in each codec, as profiles hold it.

Invariant: of a device and a number of threads it is measured once in a process.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from qsync_fx.communication.codec_benchmarks import measured
from qsync_fx.communication.codec_cost_model import by_bucket, of_speeds, slowed, uniform
from qsync_fx.communication.codecs import NAMES, codec_named
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.control_group import mean
from qsync_fx.communication.point_to_point import VALUES
from qsync_fx.errors import QSyncError
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper
from qsync_fx.predictor.replayer.cluster import Buckets, Cluster, ClusterDevice, Network
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.predictor.times import Schedule
from qsync_fx.profiler.links.collective_times import buffers_seconds, collectives
from qsync_fx.profiler.links.joint_steps import (
    CODEC,
    JointSteps,
    busy as beside_products,
    coding as coding_beside_products,
    together,
)
from qsync_fx.profiler.profile import CodecSpeed, Collective, Profile
from qsync_fx.profiler.timing.step_timers import TrainingStep, clock_for, clock_of

_VALUES = 2**23
"""More than a bucket of DistributedDataParallel holds, which lies in memory, and not in a cache. It is coded stretch by stretch."""
_REPEATS = 5


def coding_speeds(device: torch.device | None = None) -> list[CodecSpeed]:
    """Returns the speed of each codec on a device, with as many threads as torch has."""
    return list(_with_threads(torch.get_num_threads(), device or torch.device("cpu")))


@functools.cache
def _with_threads(threads: int, device: torch.device) -> tuple[CodecSpeed, ...]:
    # No bucket is foreseen by shapes of parameters, which a profile does not hold, nor by levels that the link decides.
    named = [codec_named(name) for name in NAMES]
    codecs = [
        codec
        for codec in named
        if codec.fitted((3, 5)) == codec and not isinstance(codec, Adaptive)
    ]
    clock = clock_for(threads) if device.type == "cpu" else clock_of(device)
    result = measured(codecs, _VALUES, _REPEATS, clock, device, VALUES)
    return tuple(CodecSpeed(item.codec, item.encode, item.decode) for item in result)


MOST: Final = 4.0
"""Times as long as they travel, or are coded, that messages are taken to keep a device from computing, at most."""
_NEAR: Final = 1e-3
_RANK: Final = "rank"
PLANS: Final = 2
"""Under so many steps are measured, on all ranks, also on one that has a single format: they train together."""


def linked(
    profile: Profile,
    module: nn.Module,
    compiled: Callable[[nn.Module, TrainingStep, Plan], Any],
    training: TrainingStep,
) -> list[Collective]:
    """Measures all-reduces, and steps of a model with and without them, on all ranks at once; nothing where there is one rank.

    Memory is what steps in narrow formats wait for, and what sending takes from them: the wider the format, the less is in its way.

    Args:
        profile: of this rank, without them.
        compiled: compiles a model under a plan, as `together` has it done.
        module, training: as `together` takes them.
    """
    device = next(module.parameters()).device
    links = collectives(device)
    if not links:
        return []
    alone = replace(links[0], buffers=buffers_seconds(module))

    def measured(plan: Plan) -> JointSteps:
        return together(
            module, lambda wrapped, training: compiled(wrapped, training, plan), training
        )

    plans = [Plan.uniform(name) for name in (profile.precisions[0], profile.precisions[-1])]
    assert len(plans) == PLANS
    steps: list[tuple[Plan, JointSteps]] = []
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
        message = f"no step could be trained with gradients that are sent, of which sending takes a part ({why})"
        warnings.warn(f"{message}: products are computed beside all-reduces instead", stacklevel=2)
        on_cpu = device.type == "cpu"
        busy = beside_products(alone.seconds, device)
        return [replace(alone, busy=busy, coding=coding_beside_products() if on_cpu else None)]
    result = taken_in_steps(profile, alone, steps)
    busy, coding = mean(result.busy), None if result.coding is None else mean(result.coding)
    return [replace(result, busy=busy, coding=coding)]


def taken_in_steps(
    profile: Profile, alone: Collective, steps: Sequence[tuple[Plan, JointSteps]]
) -> Collective:
    """Returns with which `slowdown`, `copies`, `busy` and `coding` the replayer has steps take as long as they did, all of them together.

    What a codec takes beside seconds of coding, such as the interpreter that its thread shares with the one that computes, and waiting for
    what ranks tell each other at the end of a step, is `coding`, too.

    Args:
        profile: of this rank.
        alone: how long messages travel while nothing is computed.
        steps: of some plans.
    """
    table = [(float(nbytes), seconds) for nbytes, seconds in alone.seconds]
    available = [
        (CostMapper(profile.graph, profile.times(), plan).schedule(), visited)
        for plan, visited in steps
    ]
    clusters = [_of_slowest(schedule, visited, alone.ranks) for schedule, visited in available]

    def foreseen(network: Network, codec: str | None = None) -> float:
        return sum(
            _step(profile, schedule, replace(cluster, network=network), codec)
            for (schedule, _), cluster in zip(available, clusters, strict=True)
        )

    def sending(busy: float) -> float:
        return foreseen(Network(all_reduce=table, ranks=alone.ranks, busy=busy))

    slowdown = sum(visited.own.left for _, visited in available) / sum(
        schedule.seconds for schedule, _ in available
    )
    copied = (
        max(0.0, sum(visited.own.copied - visited.own.left for _, visited in available)) / slowdown
    )
    copies = copied / sum(2 * _nbytes(schedule) for schedule, _ in available)
    busy = least_for(sending, sum(visited.sending for _, visited in available))
    result = replace(alone, slowdown=slowdown, copies=copies, busy=busy)
    seconds = [visited.coded for _, visited in available if visited.coded is not None]
    if len(seconds) < len(available) or not profile.codecs:
        return result

    def coded(coding: float) -> float:
        return foreseen(
            Network(all_reduce=table, ranks=alone.ranks, busy=busy, coding=coding), CODEC
        )

    return replace(result, coding=least_for(coded, sum(seconds)))


def _of_slowest(schedule: Schedule, observed: JointSteps, count: int) -> Cluster:
    """Returns devices that compute and copy as long as the slowest rank did that sent nothing, and buckets as they were."""
    slowdown = observed.slowest.left / schedule.seconds
    copies = max(0.0, observed.slowest.copied - observed.slowest.left) / (
        2 * _nbytes(schedule) * slowdown
    )
    device = ClusterDevice(count, copies=copies, slowdown=slowdown)
    return Cluster({_RANK: device}, None, Buckets(observed.bucket_bytes, observed.bucket_bytes))


def _step(profile: Profile, schedule: Schedule, cluster: Cluster, codec: str | None) -> float:
    """Returns the seconds of a step of such devices, with gradients in a codec."""
    schedules, settings = {_RANK: schedule}, None
    if codec is not None:
        speeds = slowed(of_speeds(profile.codecs, ""), cluster.devices[_RANK].slowdown)
        settings = by_bucket(schedules, cluster, uniform(schedule.parameters, codec), speeds)
    return float(simulate(schedules, cluster, settings).step.seconds)


def _nbytes(schedule: Schedule) -> int:
    return sum(parameter.numel * parameter.dtype_bytes for parameter in schedule.parameters)


def least_for(foreseen: Callable[[float], float], seconds: float) -> float:
    """Returns the least number, up to `MOST`, with which steps are foreseen as long as that; what is foreseen rises with it."""
    low, high = 0.0, MOST
    while high - low > _NEAR:
        middle = (low + high) / 2
        low, high = (middle, high) if foreseen(middle) < seconds else (low, middle)
    return high if low > 0 else 0.0
