"""Correction of an existing profile with measurements of more plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Plan, Profile
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.predictor.memory import LossMemory
from qsync_fx.profiler.measurement import measure
from qsync_fx.profiler.profile import SAMPLES, corrected
from qsync_fx.profiler.run_statistics import MeasuredRun
from tests.support.models.small_models import Perceptron, build
from tests.support.planning.measured_layer import BATCH, Counted, layer, quick
from tests.support.tiers import ALL

NARROW = Plan.uniform("bf16")


def correct(model: nn.Module, step: Any, profile: Any, **more: Any) -> Profile:
    arguments = {"plan": NARROW, "repeats": 2, "progress": False}
    return measure(model, step, [BATCH], profile=profile, **{**arguments, **more})


def test_the_plan_alone_is_measured_and_the_rest_stays(tmp_path: Path) -> None:
    before = replace(quick(layer(), Counted(), sensitivity="paper"), precisions=["fp32"])
    before.save(tmp_path / "layer.json")
    step = Counted()
    after = correct(layer(), step, tmp_path / "layer.json", path=tmp_path / "layer.json")
    assert [run.planned for run in after.runs] == [False, True]
    assert after.runs[:1] == before.runs and after.precisions == before.precisions
    assert after.sensitivity == before.sensitivity is not None
    assert Profile.load(tmp_path / "layer.json") == after and len(list(tmp_path.iterdir())) == 1
    assert before.interpolated(Plan.uniform("fp32")) == after.interpolated(NARROW) == []
    seconds = qsync_fx.replay(NARROW, after).seconds
    measured_run = after.runs[-1]
    # A layer of a few microseconds may need less time than the mean outside of operators.
    outside = [sum(run.outside[index] for run in after.runs) / len(after.runs) for index in (0, 1)]
    anchor = max(measured_run.forward, outside[0]) + max(measured_run.backward, outside[1])
    assert seconds == pytest.approx(anchor), "the prediction equals the measured step"
    # Two eager steps and two of the loss alone. For the plan and the profile's first plan: one to
    # compile, two for the peak memory, and three in each of two rounds.
    assert step.calls == 4 + 2 * (1 + 2 + 2 * 3)


def test_recalibration_adds_the_loss_memory_to_an_old_profile() -> None:
    before = quick(layer(), Counted())
    old, other = (
        replace(before, loss_memory=None),
        replace(before, loss_memory=LossMemory(held=7, most=9)),
    )
    after, unchanged = (correct(layer(), Counted(), profile, repeats=1) for profile in (old, other))
    assert (
        after.loss_memory == before.loss_memory is not None
        and unchanged.loss_memory == other.loss_memory
    )


def test_of_a_plan_that_is_measured_again_the_latest_run_counts() -> None:
    before = quick(layer(), Counted())
    again = before
    for notes in ({}, {"why": "named in other words"}):
        again = correct(layer(), Counted(), again, plan=Plan("bf16", notes=notes), repeats=1)
    assert [run.planned for run in again.runs] == [False, True] and len(again.runs[-1].steps) == 1
    uniform = correct(layer(), Counted(), before, plan=Plan.uniform("fp32"))
    assert [run.label for run in uniform.runs][:1] == ["fp32"] and uniform.runs[:1] == before.runs
    assert [run.planned for run in uniform.runs] == [False, True], (
        "runs of uniform plans are not discarded"
    )


def test_formats_of_measured_plans_stay_in_the_profile() -> None:
    narrow = correct(layer(), Counted(), quick(layer(), Counted()), repeats=1)
    third = correct(layer(), Counted(), narrow, plan=Plan.uniform("int8"), repeats=1)
    assert set(third.graph.formats) == {"fp32", "bf16", "int8"}
    assert [
        qsync_fx.replay(plan, third).seconds > 0 for plan in (NARROW, Plan.uniform("int8"))
    ] == [True, True]


def test_interrupted_recalibration_resumes_with_an_intact_profile(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    before = quick(layer(), Counted(), path=path)
    arguments = {"profile": path, "path": path, "repeats": 3}
    with pytest.raises(KeyboardInterrupt):
        correct(layer(), Counted(interrupted_at=4 + 2 * (1 + 2 + 2 * 3) + 1), **arguments)
    assert Profile.load(path) == before
    assert SAMPLES.load(f"{path}.partial").rounds == 2
    rest = Counted()
    assert (
        len(correct(layer(), rest, **arguments).runs[-1].steps) == 3
        and not Path(f"{path}.partial").exists()
    )
    assert rest.calls == 4 + 2 * (1 + 2 + 3)


def test_machine_drift_is_removed() -> None:
    before = quick(layer(), Counted())
    # With steps that vary by a half, as on a loaded machine, no drift would be significant.
    first = replace(before.runs[0], steps=before.runs[0].steps[:1] * 3)
    before = replace(before, runs=[first])
    # According to this profile, the machine was twice as fast.
    fast = replace(before, runs=[run.at_pace(0.5) for run in before.runs])
    remeasured = replace(before, runs=[replace(first, label="plan", planned=True), first])
    result = corrected(fast, remeasured).runs[-1]
    assert result.planned and result.passes == pytest.approx(first.passes / 2)
    assert [operator.forward for operator in result.operators] == pytest.approx(
        [operator.forward / 2 for operator in first.operators]
    )
    # Differences within the standard error are not corrected.
    assert corrected(before, remeasured).runs[-1] == remeasured.runs[0]
    # A plan of the profile has its old duration; otherwise, the other old runs would seem faster.
    assert corrected(fast, replace(remeasured, runs=remeasured.runs[:1])).runs[-1] == result
    # The standard error follows from the number of steps.
    slightly = replace(remeasured.runs[0].at_pace(1.03), steps=first.at_pace(1.03).steps * 10)
    many = replace(before, runs=[replace(first, steps=first.steps * 10)])
    assert (
        corrected(before, replace(remeasured, runs=[replace(slightly, steps=slightly.steps[:1])]))
        .runs[-1]
        .passes
        > first.passes
    )
    assert corrected(many, replace(remeasured, runs=[slightly])).runs[-1].passes == pytest.approx(
        first.passes
    )


def test_a_profile_of_something_else_is_refused() -> None:
    before = quick(layer(), Counted())
    with pytest.raises(ProfileError, match="another model"):
        correct(nn.Sequential(layer(), nn.ReLU()), Counted(), before)
    with pytest.raises(ProfileError, match=r"another model.* 1 modules in eval mode"):
        correct(layer().eval(), Counted(), before)
    with pytest.raises(ProfileError, match="with rounding=nearest"):
        correct(layer(), Counted(), before, options={"rounding": "nearest"})
    model = layer()
    with pytest.raises(ProfileError, match="measured with no optimizer, not SGD"):
        correct(model, Counted(), before, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ProfileError, match="another machine"):
        correct(
            layer(),
            Counted(),
            replace(before, machine=replace(before.machine, name="a faster one")),
        )
    with pytest.raises(OptionError, match="there is none"):
        correct(layer(), Counted(), before, plan=())
    with pytest.raises(OptionError, match="keeps its precisions"):
        measure(layer(), Counted(), [BATCH], ["fp32"], plan=NARROW, profile=before)


def test_profile_records_its_conditions() -> None:
    model = layer().eval()
    profile = quick(model, Counted(), options={"rounding": "nearest"}, repeats=1)
    assert profile.model.conditions == "rounding=nearest, 1 modules in eval mode"
    assert profile.model.conditions in str(profile) and profile.model.conditions in str(
        qsync_fx.replay(Plan.uniform("fp32"), profile)
    )
    with pytest.raises(OptionError, match="Inductor writes, and 'aot_eager' writes none"):
        quick(layer(), Counted(), options={"inner_backend": "aot_eager"})


@ALL
def test_mixed_plan_step_is_a_calibration_anchor() -> None:
    model = build(Perceptron)
    batch = torch.randn(64, 16), torch.randn(64, 10)
    arguments = {"repeats": 2, "progress": False, "sensitivity": None}
    before = measure(model, Counted(), [batch], ["fp32", "bf16"], **arguments)
    mixed = Plan(
        operators={"layers.0/linear": "bf16", "layers.3/linear": "fp32", "head/linear": "int8"}
    )
    assert "int8" not in before.graph.formats
    after = measure(model, Counted(), [batch], plan=mixed, profile=before, **arguments)
    measured_run: MeasuredRun = after.runs[-1]
    assert after.interpolated(mixed) == []
    assert qsync_fx.replay(mixed, after).seconds == pytest.approx(
        measured_run.forward + measured_run.backward
    )
