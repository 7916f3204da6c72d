"""`qsync measure`: output, profiles that it writes, and errors for conflicting arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsync_fx import Plan, Profile
from qsync_fx.cli import main
from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity

NETS = """
import torch
from torch import nn

def linear():
    torch.manual_seed(0)
    return nn.Linear(16, 8, bias=False), (torch.ones(4, 16),)

def function():
    return torch.relu, (torch.ones(4),)

def integers():
    return nn.Embedding(4, 2), (torch.ones(2, dtype=torch.int64),)
"""
QUICK = ["--precisions", "fp32", "--repeats", "1", "--sensitivity", "none"]


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "measured_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_written_profile_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plan = tmp_path / "linear.json", tmp_path / "plan.json"
    assert (
        main(
            ["measure", "measured_nets:linear", *QUICK, "--optimizer", "sgd", "--output", str(out)]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert "/linear" in printed.out and "optimizer SGD" in printed.out
    assert "measuring Linear under 1 plan:" in printed.err and f"wrote {out}" in printed.err
    profile = Profile.load(out)
    assert [run.label for run in profile.runs] == ["fp32"] == profile.precisions
    Plan.uniform("fp32").save(plan)
    assert main(["replay", str(plan), "--profile", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == pytest.approx(
        profile.runs[0].forward + profile.runs[0].backward + profile.optimizer_seconds, rel=0.05
    )


def test_as_json_it_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "measured_nets:linear", *QUICK, "--optimizer", "none", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["format"] == "qsync-profile" and result["optimizer"] == ""
    assert [operator["operator"] for operator in result["runs"][0]["operators"]] == ["/linear"]


def test_plan_recalibrates_an_existing_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, other, plan = tmp_path / "linear.json", tmp_path / "other.json", tmp_path / "plan.json"
    Plan.uniform("bf16").save(plan)
    model = ["measure", "measured_nets:linear", "--optimizer", "sgd", "--repeats", "1"]
    assert (
        main([*model, "--precisions", "fp32", "--sensitivity", "none", "--output", str(first)]) == 0
    )
    before = Profile.load(first)
    capsys.readouterr()
    assert main([*model, "--plan", str(plan), "--profile", str(first), "--output", str(other)]) == 0
    # The given plan and the plan of the profile.
    assert "under 2 plans:" in (printed := capsys.readouterr().err) and f"wrote {other}" in printed
    assert Profile.load(first) == before
    recalibrated = Profile.load(other)
    assert recalibrated.runs[:1] == before.runs and [run.planned for run in recalibrated.runs] == [
        False,
        True,
    ]
    assert main([*model, "--plan", str(plan), "--profile", str(first)]) == 0
    assert f"wrote {first}" in capsys.readouterr().err
    assert [run.planned for run in Profile.load(first).runs] == [False, True]
    for more, message in (
        (["--profile", str(first)], "and there is none"),
        (
            ["--profile", str(first), "--plan", str(plan), "--sensitivity", "paper"],
            "does not change its sensitivity",
        ),
        (
            ["--profile", str(first), "--plan", str(plan), "--precisions", "fp32"],
            "keeps its precisions",
        ),
        (["--profile", str(tmp_path / "nowhere.json"), "--plan", str(plan)], "cannot be read"),
    ):
        assert main([*model, *more]) == 2
        assert message in capsys.readouterr().err


def test_profile_is_saved_in_the_cache_of_torch_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "cache"))
    options = [
        "--precisions",
        "fp32,bf16",
        "--repeats",
        "1",
        "--optimizer",
        "none",
        "--sensitivity",
        "paper",
    ]
    assert main(["measure", "measured_nets:linear", *options, "--cache"]) == 0
    (plan,) = (tmp_path / "cache" / "profiles").glob("*/*.plan.json")
    profile = plan.with_name(plan.name.replace(".plan", ""))
    assert f"wrote {profile}" in capsys.readouterr().err
    assert Profile.load(profile).precisions == ["fp32", "bf16"]


def test_a_device_of_the_catalog_has_a_profile_to_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plan = tmp_path / "t4.json", tmp_path / "plan.json"
    arguments = ["measure", "measured_nets:linear", "--device", "t4", "--precisions", "fp32,fp16"]
    assert main([*arguments, "--optimizer", "sgd", "--output", str(out)]) == 0
    printed = capsys.readouterr()
    assert (
        "NVIDIA T4, predicted" in printed.out
        and "optimizer SGD" in printed.out
        and printed.err == f"qsync: wrote {out}\n"
    )
    profile = Profile.load(out, any_machine=True)
    assert (
        profile.graph.device == "t4"
        and profile.precisions == ["fp32", "fp16"]
        and profile.optimizer_memory
    )
    Plan.uniform("fp16").save(plan)
    assert main(["replay", str(plan), "--profile", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["name"] == "t4"
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == "AdamW"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["linear", "--device", "t5"], "did you mean 't4'?"),
        (
            ["linear", "--device", "t4", "--precision", "int8"],
            "a profile covers several precisions",
        ),
        (["linear", "--device", "t4", "--repeats", "3"], "cannot be combined with --repeats"),
        (
            ["linear", "--device", "t4", "--cache", "--scaling", "row"],
            "cannot be combined with --scaling, --cache",
        ),
        (["linear", "--precision", "int8"], "a profile covers several precisions"),
        (["linear", "--precisions", "fp23"], "did you mean 'fp32'?"),
        (["linear", "--precisions", "fp32", "--optimizer", "sdg"], "did you mean 'sgd'?"),
        (["linear", "--precisions", "fp32", "--repeats", "0"], "cannot be measured 0 times"),
        (["function"], "the model is a function without parameters"),
    ],
)
def test_measure_rejects_invalid_options(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *others = arguments
    assert main(["measure", f"measured_nets:{name}", *others]) == 2
    error = capsys.readouterr().err
    assert says in error and "do:" in error


@pytest.mark.parametrize("device", [[], ["--device", "t4"]])
def test_batch_sizes_are_in_one_profile(
    device: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "linear.json")
    quick = QUICK[:2] if device else QUICK
    sizes = ["--batch-sizes", "4,8", "--output", path]
    assert main(["measure", "measured_nets:linear", *quick, *device, *sizes]) == 0
    assert "batches of 4 samples above; also measured: 8" in capsys.readouterr().out
    profile = Profile.load(path, any_machine=True)
    assert profile.at_batch(6).batch_size == 6
    plan = str(tmp_path / "plan.json")
    cluster = tmp_path / "cluster.toml"
    classes = ("a", "slowdown = 2\nbatch = 6"), ("b", "batch = 8")
    cluster.write_text(
        "".join(f"[devices.{name}]\nprofile = 'linear.json'\n{text}\n" for name, text in classes)
        + "[network]\nbandwidth = 1e9\nlatency = 1e-5\n"
    )
    sensitivity = tmp_path / "sensitivity.json"
    Sensitivity("second_order", "", {"/linear": {}}, steps=1).save(sensitivity)
    arguments = ["plan", "--cluster", str(cluster), "--sensitivity", str(sensitivity)]
    assert main([*arguments, "--batch", "global", "--compare", "--output", plan]) == 0
    printed = capsys.readouterr()
    assert sum(ClusterPlan.load(plan).batches.values()) == 14
    assert "dynamic-batches" in printed.out
