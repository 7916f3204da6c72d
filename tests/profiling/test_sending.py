"""What sending takes of a device is what has steps that were trained together take as long as they did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Cluster, Plan
from qsync_fx.predictor.mapper import CostMapper
from qsync_fx.predictor.replay.cluster_parts import Buckets, Device, Network
from qsync_fx.predictor.replay.fleet import played
from qsync_fx.profiling.measuring.together import Together
from qsync_fx.profiling.profile import Collective, Profile
from qsync_fx.profiling.sending import MOST, busy_in_steps

TABLE = [(2**10, 1e-7), (2**20, 1e-6), (2**24, 1.6e-5)]
PLAN = Plan.uniform("fp32")


@pytest.fixture(scope="module")
def profile() -> Profile:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch).square().mean()
        return result

    return qsync_fx.devices.get("t4").profile(model, step, torch.randn(64, 512), precisions=("fp32",))


def steps(profile: Profile, busy: float, slower: float) -> Together:
    """Returns steps as the replayer foresees them."""
    schedule = replace(CostMapper(profile.graph, profile.times(), PLAN).schedule(), optimizer=0.0)
    network = Network(all_reduce=[(float(nbytes), seconds) for nbytes, seconds in TABLE], ranks=2, busy=busy)
    cluster = Cluster({"t4": Device(count=2, copies=0.0, slowdown=slower)}, network, Buckets(2**20, 2**20))
    return Together(
        schedule.seconds * slower, float(played({"t4": schedule}, cluster).step.seconds), bucket_bytes=2**20
    )


@pytest.mark.parametrize("busy", [0.3, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_what_steps_were_made_with_is_found_again(profile: Profile, busy: float, slower: float) -> None:
    found = busy_in_steps(profile, Collective("gloo", 2, TABLE), steps(profile, busy, slower), PLAN)
    assert found == pytest.approx(busy, abs=0.01)


def test_steps_that_sending_makes_no_longer_or_far_too_long_have_the_least_and_the_most(profile: Profile) -> None:
    seen = steps(profile, 0.0, 1.0)
    assert busy_in_steps(profile, Collective("gloo", 2, TABLE), replace(seen, sending=seen.apart), PLAN) == 0
    endless = replace(seen, sending=100 * seen.apart)
    assert busy_in_steps(profile, Collective("gloo", 2, TABLE), endless, PLAN) == pytest.approx(MOST, abs=0.01)
