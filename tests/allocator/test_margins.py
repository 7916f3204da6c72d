"""Time margins of plans: as large as the uncertainty of the profiles, for devices that delay
others.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import Cluster, OptionError, Profile
from qsync_fx.allocator import PlanNote, PlanNoteKind, PlanResult, evaluate_plan
from qsync_fx.allocator.feasibility import MOST, slowed
from qsync_fx.predictor.replayer.cluster import ClusterDevice, Network
from tests.support.planning.allocation_problems import drawn_sensitivity

FLEET = Cluster(
    {"fast": ClusterDevice(batch=512), "slow": ClusterDevice(slowdown=1.6, batch=512)},
    Network(1e12, 1e-7),
)


@functools.cache
def reckoned() -> Profile:
    """Return a profile of 20 layers on a T4, wide enough for INT8 to be faster, and many enough for
    plans to use the available time.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(20)))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        result: Tensor = model(batch).square().mean()
        return result

    profile = qsync_fx.catalog_profile("t4", model, step, torch.randn(512, 1024))
    return replace(profile, sensitivity=drawn_sensitivity(profile.graph))


def measured(spread: float) -> Profile:
    """Return the profile with three steps of each plan, which differ by the spread."""
    profile = reckoned()
    runs = []
    for run in profile.runs:
        forward, backward, optimizer = run.steps[0]
        steps = [
            (forward * factor, backward * factor, optimizer)
            for factor in (1 - spread, 1.0, 1 + spread)
        ]
        runs.append(replace(run, steps=steps))
    return replace(profile, runs=runs)


def found(profile: Profile, margin: float | None = None, **more: object) -> PlanResult:
    return qsync_fx.find_plan({"fast": profile, "slow": profile}, FLEET, margin=margin, **more)  # type: ignore[arg-type]


def leaves(answer: PlanResult) -> dict[str, float]:
    notes: list[PlanNote] = [note for note in answer.notes if note.kind == PlanNoteKind.LEAVES]
    return {note.device: note.numbers["share"] for note in notes}


@pytest.mark.parametrize(
    ("spread", "share"), [(0.0, 0.02 * 2**0.5), (0.05, 0.05 * 2**0.5), (0.5, MOST)]
)
def test_margin_reserves_the_uncertainty_of_a_profile(spread: float, share: float) -> None:
    answer, without_margin = found(measured(spread)), found(measured(spread), 0.0)
    assert leaves(answer) == {"slow": pytest.approx(share)}
    assert leaves(without_margin) == {}
    limit = answer.problem.seconds
    assert limit is not None
    assert (
        limit
        == without_margin.problem.seconds
        == evaluate_plan(answer.problem, answer.problem.uniform()).seconds
    )
    assert evaluate_plan(slowed(answer.problem, {"slow": share}), answer.plans).seconds <= limit * (
        1 + 1e-9
    )
    assert evaluate_plan(
        slowed(answer.problem, {"slow": share}), without_margin.plans
    ).seconds > limit * (1 + 1e-9)
    assert answer.evaluation == evaluate_plan(answer.problem, answer.plans)
    assert answer.fits
    assert (
        without_margin.evaluation.variance
        < answer.evaluation.variance
        < evaluate_plan(answer.problem, answer.problem.uniform()).variance
    )
    assert PlanNoteKind.LEAVES in str(answer)


def test_no_margin_by_default() -> None:
    assert leaves(found(reckoned())) == {}  # catalog profiles have no spread
    for fast, slow in ((measured(0.05), reckoned()), (reckoned(), measured(0.05))):
        assert leaves(qsync_fx.find_plan({"fast": fast, "slow": slow}, FLEET)) == {
            "slow": pytest.approx(0.05)
        }
    alone = qsync_fx.find_plan(measured(0.05), target="fp16", objective="hybrid")
    assert leaves(alone) == {}  # no other device waits
    assert (
        leaves(
            qsync_fx.find_plan(measured(0.05), objective="fastest", budget=float("inf"), margin=0.1)
        )
        == {}
    )


def test_a_margin_that_no_plan_leaves_is_none() -> None:
    """If the slow device sets the pace, only uniform low precision meets the limit."""
    slower = replace(
        FLEET, devices={**FLEET.devices, "slow": ClusterDevice(slowdown=40.0, batch=512)}
    )
    profiles = {"fast": reckoned(), "slow": reckoned()}
    plain = qsync_fx.find_plan(profiles, slower)
    assert plain.problem.seconds is not None
    none = qsync_fx.find_plan(profiles, slower, margin=0.1, target=plain.problem.seconds)
    assert leaves(none) == {}
    assert none.plans == plain.plans
    # The default limit is the same step time, so the plan is the same.
    assert qsync_fx.find_plan(profiles, slower, margin=0.1).plans == plain.plans
    with pytest.raises(OptionError, match="margin"):
        found(reckoned(), 1.0)
