"""Profiles of devices of the catalog, compared with analytic times and with measured profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Plan
from qsync_fx.devices import get
from qsync_fx.diagnostics import explain
from qsync_fx.errors import ProfileError
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper import scheduled, states
from qsync_fx.predictor.memory.cuda_memory import FRAGMENTATION, workspace_bytes
from qsync_fx.profiler.measurement import measure
from qsync_fx.profiler.model_graph_builder import build_model_graph
from qsync_fx.profiler.profile import Profile

T4 = get("t4")
BATCH = torch.randn(64, 512)


def step(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    between = nn.Sequential(nn.Flatten(), nn.GELU())
    return nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), between, nn.Linear(1024, 512)
    )


@pytest.fixture(scope="module")
def profile() -> Profile:
    net = model()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.AdamW(net.parameters())
    result = qsync_fx.catalog_profile(T4, net, step, BATCH, ("fp32", "fp16", "int8"), optimizer)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not optimizer.state
    return result


@pytest.mark.parametrize(
    "plan",
    [
        *map(Plan.uniform, ("fp32", "fp16", "int8")),
        Plan.uniform("fp16").with_precision("2/*", "int8"),
        Plan.uniform("fp32").with_precision("0/*", "fp16").with_precision("4/*", "int8"),
    ],
    ids=str,
)
def test_catalog_step_equals_the_device_times(profile: Profile, plan: Plan) -> None:
    graph = build_model_graph(
        explain(model(), BATCH, options={"target": "t4"}), ["fp32", "fp16", "int8"]
    )
    predicted = states(graph, plan)
    expected, profiled = (
        scheduled(predicted, times).seconds for times in (DeviceTimes(T4, graph), profile.times())
    )
    assert profiled == pytest.approx(expected, rel=0.1)


def test_catalog_profile_names_its_source_and_device(profile: Profile, tmp_path: Path) -> None:
    assert profile.machine.name == "NVIDIA T4, predicted"
    assert profile.optimizer == "AdamW"
    assert profile.loss_memory is not None and profile.loss_memory.most >= 2 * 4 * 64 * 512
    assert not profile.model.conditions, (
        "the target device is the machine, not a condition of the times"
    )
    assert profile.optimizer_seconds == T4.memory_seconds(
        28 * sum(p.numel() for p in model().parameters())
    )
    assert [collective.ranks for collective in profile.collectives] == [8]
    int8, fp32 = (
        next(run for run in profile.runs if run.label == label) for label in ("int8", "fp32")
    )
    assert int8.peak_bytes > 0 < fp32.peak_bytes
    assert int8.forward < fp32.forward
    profile.save(tmp_path / "t4.json")
    with pytest.raises(ProfileError, match="measured on another machine"):
        Profile.load(tmp_path / "t4.json")
    assert Profile.load(tmp_path / "t4.json", any_machine=True) == profile
    assert "flatten" not in str(profile) and "1 operator more: no time, and nothing saved" in str(
        profile
    )
    assert "e-1" not in str(profile), "rounding errors of zero are not printed"


def test_catalog_memory_equals_a_measured_profile(profile: Profile) -> None:
    """The peak of a run excludes memory that is allocated before the step; a replay includes it."""
    net, state = model(), sum(p.numel() for p in model().parameters())
    before = 4 * 3 * state + 4 * BATCH.numel() + workspace_bytes("t4") + FRAGMENTATION
    for run in profile.runs[:3]:
        timeline = qsync_fx.replay(Plan.uniform(run.label), profile)
        assert run.peak_bytes == timeline.peak_bytes["t4"] - before
    reference = measure(
        net,
        step,
        [BATCH],
        ["fp32"],
        repeats=1,
        optimizer=torch.optim.AdamW,
        sensitivity=None,
        progress=False,
    )
    numels, optimizer = [p.numel() for p in net.parameters()], reference.optimizer_memory
    assert optimizer is not None
    # On a GPU the optimizer updates all parameters at once.
    more = optimizer.step_bytes(numels, on_gpu=True) - optimizer.step_bytes(numels)
    measured = reference.runs[0].peak_bytes
    assert measured is not None and more > 0
    assert profile.runs[0].peak_bytes == pytest.approx(measured + more, rel=0.02)
    for printed in (reference, profile):
        assert str(printed).count("peak beyond state") == 2, (
            '"peak beyond state" is a column and is explained'
        )


def test_device_file_gives_profiles(tmp_path: Path) -> None:
    text = (
        Path(T4.path)
        .read_text()
        .replace('name = "t4"', 'name = "half"')
        .replace("peak = 65e12", "peak = 32.5e12")
    )
    (tmp_path / "half.toml").write_text(text)
    half = qsync_fx.catalog_profile(tmp_path / "half.toml", model(), step, BATCH, ["fp16"])
    full = qsync_fx.catalog_profile(T4, model(), step, BATCH, ["fp16"])
    assert half.runs[0].forward > full.runs[0].forward
    assert half.optimizer == ""
    assert half.optimizer_seconds == 0


def test_saved_profile_contains_no_local_path(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (T4.target, profile.graph.device) == ("t4", "t4")
    assert str(Path(T4.path).parent) not in profile.to_json()
    file = tmp_path / "mine.toml"
    file.write_text(Path(T4.path).read_text().replace('name = "t4"', 'name = "other"'))
    assert get(file).target == str(file), "a device outside of the search path is named by its file"
    monkeypatch.setenv("QSYNC_DEVICES", str(tmp_path))
    assert get(file).target == get("mine").target == "mine"
    result = qsync_fx.catalog_profile("mine", model(), step, BATCH, ["fp16"])
    assert result.graph.device == "mine" and str(tmp_path) not in result.to_json()
    # A user's file overrides the package's file of the same name.
    file.rename(tmp_path / "t4.toml")
    assert get("t4").target == "t4" and T4.target == T4.path


def test_a_cpu_of_the_catalog_needs_no_target() -> None:
    result = qsync_fx.catalog_profile("epyc-9004", model(), step, BATCH)
    assert result.precisions == ["fp32", "bf16", "int8"]
    assert result.machine.device == "cpu"


def test_catalog_profile_does_not_depend_on_earlier_sizes() -> None:
    net = nn.Sequential(nn.Linear(512, 8))
    for size in (3, 5, 7):
        result = qsync_fx.catalog_profile(T4, net, step, torch.randn(size, 512), ["fp16"])
        explain(net, torch.randn(size + 20, 512))
    assert result.runs[0].forward > 0


def test_a_step_that_does_not_call_its_model_is_an_error() -> None:
    with pytest.raises(ProfileError, match="did not call the model"):
        qsync_fx.catalog_profile(
            T4, model(), lambda net, batch: torch.zeros(1, requires_grad=True).sum(), BATCH
        )
