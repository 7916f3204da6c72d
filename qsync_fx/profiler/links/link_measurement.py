"""Measurement of a device's links: collectives, their effect on computation, and codecs.

Steps are measured in the profile's first and last precision. `busy` and `coding` are fitted so that
the replayer predicts the total step time, if values up to `MOST` suffice.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from qsync_fx.communication.codec_benchmarks import measured
from qsync_fx.communication.codec_cost_model import by_bucket, of_device, slowed, uniform
from qsync_fx.communication.codecs import NAMES, codec_named
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.control_group import mean
from qsync_fx.communication.point_to_point import VALUES
from qsync_fx.errors import QSyncError
from qsync_fx.plan.plan import Plan
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper
from qsync_fx.predictor.cost_mapper.times import Schedule
from qsync_fx.predictor.replayer.cluster import Buckets, Cluster, ClusterDevice, Network
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.profiler.links.collective_times import MANY, buffers_seconds, collectives
from qsync_fx.profiler.links.exchange_times import exchanges
from qsync_fx.profiler.links.joint_steps import CODEC, CompilePlan, JointSteps, together
from qsync_fx.profiler.profile import CodecSpeed, Collective, Profile
from qsync_fx.profiler.timing.step_timers import TrainingStep, clock_for, clock_of

_VALUES = 2**23
"""Values to code: more than a DistributedDataParallel bucket or a cache; coded in chunks."""
_REPEATS = 5


def coding_speeds(device: torch.device | None = None) -> list[CodecSpeed]:
    """Return the speed of each codec on a device, measured once per number of threads.

    On a GPU, there are two per codec: with copies to and from the host, and without.
    """
    return list(_with_threads(torch.get_num_threads(), device or torch.device("cpu")))


@functools.cache
def _with_threads(threads: int, device: torch.device) -> tuple[CodecSpeed, ...]:
    named = [codec_named(name) for name in NAMES]
    # Without codecs that depend on the shapes of parameters or on links.
    independent = [codec for codec in named if codec.fitted((3, 5)) == codec]
    codecs = [codec for codec in independent if not isinstance(codec, Adaptive)]
    clock = clock_for(threads) if device.type == "cpu" else clock_of(device)
    result = []
    for on_device in (False,) if device.type == "cpu" else (False, True):
        speeds = measured(codecs, _VALUES, _REPEATS, clock, device, VALUES, on_device)
        result += [CodecSpeed(item.codec, item.encode, item.decode, on_device) for item in speeds]
    return tuple(result)


MOST: Final = 4.0
"""Maximum delay of computation, as a multiple of transfer or coding time."""
_TOLERANCE: Final = 1e-3
_RANK: Final = "rank"
PLANS: Final = 2
"""Number of plans, equal on all ranks, even with a single format, as ranks train together."""


def linked(
    profile: Profile,
    module: nn.Module,
    compiled: CompilePlan,
    training: TrainingStep,
    share: float = 1.0,
) -> list[Collective]:
    """Measure all-reduces, exchanges of compressed gradients, and steps with and without them.

    The result is [] for a single rank. `share` is the duration of the measurement, as a fraction
    of the default.

    Sending reduces memory bandwidth, for which steps in narrow formats wait more than in wide ones.
    """
    device = next(module.parameters()).device
    many = round(MANY * share)
    links = collectives(device, many)
    if not links:
        return []
    alone = replace(
        links[0], buffers=buffers_seconds(module), exchanges=exchanges(device, many=many)
    )

    plans = [Plan.uniform(name) for name in (profile.precisions[0], profile.precisions[-1])]
    assert len(plans) == PLANS
    try:
        steps = [(plan, together(module, compiled, training, plan, share)) for plan in plans]
    except QSyncError:
        raise
    except Exception as error:  # noqa: BLE001 - a step may fail in any way with a DDP model
        why, steps = str(error) or type(error).__name__, []
    if not steps:
        gc.collect()  # frees the hooks that DistributedDataParallel registered on parameters
        busy = float(device.type == "cpu")
        warnings.warn(
            f"no step could be trained with DistributedDataParallel ({why}): predictions assume "
            f"that sending delays computation by {busy:.0%} of its time",
            stacklevel=2,
        )
        return [replace(alone, busy=busy)]
    result = taken_in_steps(profile, alone, steps)
    result = replace(result, busy=mean(result.busy))
    return [result if result.coding is None else replace(result, coding=mean(result.coding))]


def taken_in_steps(
    profile: Profile, alone: Collective, steps: Sequence[tuple[Plan, JointSteps]]
) -> Collective:
    """Return a collective fitted so that the replayer predicts the measured steps.

    Slowdown, copies, busy and coding are fitted to the total over all plans. `coding` includes
    overhead such as contention for the interpreter lock and waiting for control messages.
    """
    table = [(float(nbytes), seconds) for nbytes, seconds in alone.seconds]
    measured = [joint for _, joint in steps]
    schedules = [CostMapper(profile.graph, profile.times(), plan).schedule() for plan, _ in steps]
    clusters = [
        _of_slowest(schedule, joint, alone.ranks)
        for schedule, joint in zip(schedules, measured, strict=True)
    ]

    def predicted(busy: float, coding: float | None = None, codec: str | None = None) -> float:
        network = Network(
            all_reduce=table,
            ranks=alone.ranks,
            busy=busy,
            coding=coding,
            exchanges=alone.exchanges,
        )
        return sum(
            _step(profile, schedule, replace(cluster, network=network), codec)
            for schedule, cluster in zip(schedules, clusters, strict=True)
        )

    left = sum(joint.this_rank.left for joint in measured)
    slowdown = left / sum(schedule.seconds for schedule in schedules)
    copied = max(0.0, sum(joint.this_rank.copied for joint in measured) - left) / slowdown
    copies = copied / sum(2 * _nbytes(schedule) for schedule in schedules)
    busy = least_for(predicted, sum(joint.sending for joint in measured))
    result = replace(alone, slowdown=slowdown, copies=copies, busy=busy)
    coded = [joint.coded for joint in measured if joint.coded is not None]
    unmeasured = Network(exchanges=alone.exchanges).exchange("all") is None
    if len(coded) < len(measured) or not profile.codecs or unmeasured:
        return result
    with_codec = functools.partial(predicted, busy, codec=CODEC)
    return replace(result, coding=least_for(with_codec, sum(coded)))


def _of_slowest(schedule: Schedule, observed: JointSteps, count: int) -> Cluster:
    slowdown = observed.slowest.left / schedule.seconds
    copied = max(0.0, observed.slowest.copied - observed.slowest.left)
    copies = copied / (2 * _nbytes(schedule) * slowdown)
    device = ClusterDevice(count, copies=copies, slowdown=slowdown)
    return Cluster({_RANK: device}, None, Buckets(observed.bucket_bytes, observed.bucket_bytes))


def _step(profile: Profile, schedule: Schedule, cluster: Cluster, codec: str | None) -> float:
    schedules, settings = {_RANK: schedule}, None
    if codec is not None:
        speeds = slowed(of_device(None, "", profile.codecs), cluster.devices[_RANK].slowdown)
        settings = by_bucket(schedules, cluster, uniform(schedule.parameters, codec), speeds)
    return float(simulate(schedules, cluster, settings).step.seconds)


def _nbytes(schedule: Schedule) -> int:
    return sum(parameter.numel * parameter.dtype_bytes for parameter in schedule.parameters)


def least_for(predicted: Callable[[float], float], seconds: float) -> float:
    """Return the least value up to `MOST` at which the non-decreasing prediction is `seconds`."""
    low, high = 0.0, MOST
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        if predicted(middle) < seconds:
            low = middle
        else:
            high = middle
    return high if low > 0 else 0.0
