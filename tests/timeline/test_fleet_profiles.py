"""Profiles of a cluster's devices: the name of a device is equivalent to its profile.

A replay on one device rejects profiles of other machines.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import Cluster, Plan, Profile, ProfileError
from qsync_fx.devices.machine import this_machine
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.memory import MOMENTUM
from qsync_fx.predictor.replayer.cluster import ClusterDevice, Network
from qsync_fx.timeline.device_profiles import load_device_profiles

FORMATS = ("fp32", "fp16")
LINKS = "[network]\nbandwidth = 1e9\nlatency = 3e-5\n"


def step(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def reckoned(device: str, momentum: float | None = 0.9) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = (
        None if momentum is None else torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    )
    return qsync_fx.catalog_profile(device, model, step, torch.randn(64, 512), FORMATS, optimizer)


@pytest.fixture(scope="module")
def t4() -> Profile:
    return reckoned("t4")


@pytest.fixture(scope="module")
def local_profile() -> Profile:
    """Return a profile that represents a measurement on this processor."""
    return replace(reckoned("epyc-9004"), machine=this_machine())


def fleet(folder: Path, *tables: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text("\n".join([*tables, LINKS]))
    return path


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_device_name_selects_its_profile(momentum: float | None, tmp_path: Path) -> None:
    profile = reckoned("t4", momentum)
    cluster = fleet(tmp_path, "[devices.given]", "[devices.named]\ndevice = 't4'")
    timeline = qsync_fx.replay(Plan.uniform("fp16"), {"given": profile}, cluster=cluster)
    operators: dict[str, list[Any]] = {"given": [], "named": []}
    for operator in timeline.by_operator():
        operators[operator.device].append(replace(operator, device=""))
    assert operators["given"] == operators["named"]
    assert timeline.peak_bytes["given"] == timeline.peak_bytes["named"] > 0
    assert max(timeline.waiting.values()) == pytest.approx(0, abs=1e-12)


def test_model_comes_from_a_device_with_equal_formats(
    local_profile: Profile, t4: Profile, tmp_path: Path
) -> None:
    cluster = fleet(tmp_path, "[devices.here]", "[devices.given]", "[devices.named]\ndevice = 't4'")
    timeline = qsync_fx.replay(
        Plan.uniform("fp32"), {"here": local_profile, "given": t4}, cluster=cluster
    )
    assert timeline.peak_bytes["given"] == timeline.peak_bytes["named"]


def test_device_without_a_profile_uses_optimizer_and_loss_of_another(
    local_profile: Profile, tmp_path: Path
) -> None:
    cluster = fleet(tmp_path, "[devices.here]", "[devices.named]\ndevice = 'epyc-9004'")
    _, times = load_device_profiles({"here": local_profile}, cluster)
    named = times["named"]
    assert isinstance(named, DeviceTimes)
    assert (named.optimizer_memory, named.loss_memory) == (MOMENTUM, local_profile.loss_memory)
    # Both are profiles of one device. Only one of them separates casts; their totals are equal.
    assert named.optimizer() == local_profile.optimizer_seconds
    timeline = qsync_fx.replay(Plan.uniform("fp16"), {"here": local_profile}, cluster=cluster)
    assert timeline.peak_bytes["here"] == timeline.peak_bytes["named"] > 0
    takes = {name: alone.computed for name, alone in timeline.played.devices.items()}
    assert takes["named"] == pytest.approx(takes["here"])
    _, times = load_device_profiles({"here": replace(local_profile, optimizer="")}, cluster)
    assert isinstance(named_times := times["named"], DeviceTimes) and named_times.optimizer() == 0


def test_device_with_other_formats_requires_a_profile(
    local_profile: Profile, tmp_path: Path
) -> None:
    cluster = fleet(tmp_path, "[devices.here]", "[devices.named]\ndevice = 't4'")
    with pytest.raises(ProfileError, match="the profiles are for cpu") as caught:
        qsync_fx.replay(Plan.uniform("fp32"), {"here": local_profile}, cluster=cluster)
    message = str(caught.value)
    assert caught.value.where == "devices.named"
    assert 'qsync_fx.catalog_profile("t4", model, step, batch).save("t4.json")' in message
    assert (
        "qsync measure MODULE:CALLABLE --device t4 --output t4.json" in message
        and "--profile named=t4.json" in message
    )
    assert "target" not in message and "catalog" not in message.replace("catalog_profile", "")


def test_profile_of_another_machine_is_rejected(local_profile: Profile, tmp_path: Path) -> None:
    local, other = tmp_path / "own.json", tmp_path / "other.json"
    local_profile.save(local)
    replace(local_profile, machine=replace(local_profile.machine, name="a faster one")).save(other)
    plan = Plan.uniform("fp32")
    seconds = qsync_fx.replay(plan, local).seconds
    with pytest.raises(ProfileError, match="a faster one") as caught:
        qsync_fx.replay(plan, str(other))
    assert "other.json" in (caught.value.where or "") and "any_machine=True" in (
        caught.value.do or ""
    )
    assert qsync_fx.replay(plan, other, any_machine=True).seconds == seconds
    # A named profile belongs to a fleet, and a loaded profile was accepted explicitly.
    assert qsync_fx.replay(plan, {"there": other}).seconds == seconds
    assert (
        qsync_fx.replay(plan, other, cluster=fleet(tmp_path, "[devices.there]")).seconds == seconds
    )
    assert qsync_fx.replay(plan, Profile.load(other, any_machine=True)).seconds == seconds
    assert load_device_profiles(other, None)[1].keys() == {"cpu"}, (
        "find_plan accepts a profile of another machine"
    )


def test_computed_profile_is_not_a_measurement(t4: Profile, tmp_path: Path) -> None:
    t4.save(tmp_path / "t4.json")
    assert qsync_fx.replay(Plan.uniform("fp16"), tmp_path / "t4.json").seconds > 0


@pytest.mark.parametrize(("batch", "warns"), [(64, False), (32, True), (512, False), (None, False)])
def test_unknown_batch_size_gives_a_warning(
    t4: Profile, batch: int | None, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    cluster = Cluster({"slow": ClusterDevice(count=2, batch=batch)}, Network(bandwidth=1e9))
    load_device_profiles({"slow": t4}, cluster)
    messages = [
        str(warning.message) for warning in recwarn if "cluster has batch" in str(warning.message)
    ]
    assert bool(messages) == warns, (
        "512 is a leading size of other tensors: the batch dimension is ambiguous"
    )
    assert all(
        text.startswith("devices.slow: the cluster has batch = 32, but no tensor in the")
        for text in messages
    )
    assert all("leading sizes: 64, 512, 1024" in text for text in messages)
