"""Fit of a device's communication overhead to the measured duration of joint steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Cluster, Plan
from qsync_fx.communication.codec_cost_model import by_bucket, of_speeds, slowed, uniform
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.predictor.replayer.cluster import Buckets, ClusterDevice, Exchange, Network
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.profiler.links.joint_steps import CODEC, JointSteps, Unsent
from qsync_fx.profiler.links.link_measurement import MOST, taken_in_steps
from qsync_fx.profiler.profile import CodecSpeed, Collective, Profile

TABLE = [(2**10, 1e-7), (2**20, 1e-6), (2**24, 1.6e-5)]
EXCHANGES = [Exchange("point_to_point", "all", 2, [(2.0**10, 2e-7), (2.0**24, 2e-5)])]
"""Times of the transport of compressed gradients, whose link differs from `TABLE`."""
PLAN = Plan.uniform("fp32")


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        return result

    return qsync_fx.catalog_profile("t4", model, step, torch.randn(64, 512), precisions=("fp32",))


def steps(
    profile: Profile, busy: float, slower: float, copies: float = 1e-9, coding: float | None = None
) -> JointSteps:
    """Return steps that the replayer predicts; this rank is twice as fast as the slowest."""
    schedule = CostMapper(profile.graph, profile.times(), PLAN).schedule()
    nbytes = sum(parameter.numel * parameter.dtype_bytes for parameter in schedule.parameters)
    table = [(float(nbytes), seconds) for nbytes, seconds in TABLE]
    network = Network(all_reduce=table, ranks=2, busy=busy, coding=coding, exchanges=EXCHANGES)
    cluster = Cluster(
        {"t4": ClusterDevice(count=2, copies=copies, slowdown=slower)},
        network,
        Buckets(2**20, 2**20),
    )
    left, copied = schedule.seconds, schedule.seconds + 2 * nbytes * copies
    sending, coded = float(simulate({"t4": schedule}, cluster).step.seconds), None
    if coding is not None:
        rates = slowed(of_speeds(profile.codecs, ""), slower)
        compression = by_bucket(
            {"t4": schedule}, cluster, uniform(schedule.parameters, CODEC), rates
        )
        coded = float(simulate({"t4": schedule}, cluster, compression).step.seconds)
    this_rank, slowest = (
        Unsent(times * slower * left, times * slower * copied) for times in (0.5, 1.0)
    )
    return JointSteps(this_rank, slowest, sending, 2**20, coded)


@pytest.mark.parametrize("busy", [0.3, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("slower", [1.0, 2.5])
@pytest.mark.parametrize("copies", [0.0, 1e-9])
def test_fit_recovers_the_overhead_of_synthetic_steps(
    profile: Profile, busy: float, slower: float, copies: float
) -> None:
    result = taken_in_steps(
        profile, Collective("gloo", 2, TABLE), [(PLAN, steps(profile, busy, slower, copies))]
    )
    assert result.slowdown == pytest.approx(slower / 2), "this rank is twice as fast as the slowest"
    assert (result.copies, result.busy) == (
        pytest.approx(copies, abs=1e-15),
        pytest.approx(busy, abs=0.01),
    )


def test_extreme_steps_give_the_minimum_and_maximum_overhead(
    profile: Profile,
) -> None:
    joint, table = steps(profile, 0.0, 1.0), Collective("gloo", 2, TABLE)
    assert (
        taken_in_steps(profile, table, [(PLAN, replace(joint, sending=joint.slowest.copied))]).busy
        == 0
    )
    endless = replace(joint, sending=100 * joint.slowest.copied)
    assert taken_in_steps(profile, table, [(PLAN, endless)]).busy == pytest.approx(MOST, abs=0.01)


def test_a_step_that_copying_makes_shorter_by_chance_has_copies_of_no_time(
    profile: Profile,
) -> None:
    joint = steps(profile, 1.0, 1.0)
    faster = Unsent(joint.this_rank.left, 0.9 * joint.this_rank.left)
    assert (
        taken_in_steps(
            profile, Collective("gloo", 2, TABLE), [(PLAN, replace(joint, this_rank=faster))]
        ).copies
        == 0
    )


@pytest.mark.parametrize("coding", [0.0, 0.9, 2.5])
@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_codec_time_reproduces_the_measured_steps(
    profile: Profile, slower: float, coding: float
) -> None:
    coded = replace(profile, codecs=[CodecSpeed(name, 2e9, 3e9) for name in (CODEC, "fp32")])
    joint = steps(coded, 0.6, slower, coding=coding)
    table = Collective("gloo", 2, TABLE, exchanges=EXCHANGES)
    result = taken_in_steps(coded, table, [(PLAN, joint)])
    assert (result.busy, result.coding) == (
        pytest.approx(0.6, abs=0.01),
        pytest.approx(coding, abs=0.01),
    )
    assert taken_in_steps(profile, table, [(PLAN, joint)]).coding is None, (
        "the profile has no codec speeds"
    )
    assert taken_in_steps(coded, Collective("gloo", 2, TABLE), [(PLAN, joint)]).coding is None, (
        "the transport of the codecs was not measured"
    )
    assert taken_in_steps(coded, table, [(PLAN, replace(joint, coded=None))]).coding is None, (
        "no step with a codec was measured"
    )


def test_total_time_of_several_plans_is_predicted(profile: Profile) -> None:
    both = [(PLAN, steps(profile, busy, 1.0)) for busy in (0.6, 1.0)]
    assert taken_in_steps(profile, Collective("gloo", 2, TABLE), both).busy == pytest.approx(
        0.8, abs=0.01
    )
