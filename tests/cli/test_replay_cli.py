"""`qsync replay`: output, files that it writes, and errors for conflicting arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import ClusterPlan, Plan, Profile
from qsync_fx.cli import main
from tests.support.distributed import traced_rank


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    traced_rank.main(0, 1, str(folder))
    return folder


def test_a_trace(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = str(traces / "kineto-0.json"), tmp_path / "out.json"
    assert main(["replay", "--trace", trace, "--operators", "3", "--perfetto", str(out)]) == 0
    printed = capsys.readouterr()
    assert "per step" in printed.out and "rank 0" in printed.out and "more operators" in printed.out
    assert f"wrote {out}" in printed.err
    assert {event["name"] for event in json.loads(out.read_text())["traceEvents"]} >= {
        "optimizer",
        "aten::linear#0",
    }


def test_a_trace_on_a_cluster_as_json(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("[devices.cpu]\ncount = 4\nbatch = 64\n[network]\nbandwidth = 1e9\n")
    files = [
        f"cpu={traces / 'kineto-0.json'}",
        "--execution-trace",
        str(traces / "execution-0.json"),
    ]
    assert main(["replay", "--cluster", str(cluster), "--json", "--trace", *files]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["devices"][0]["name"] == "cpu" and result["devices"][0]["count"] == 4
    assert result["samples_per_second"] == pytest.approx(256 / result["seconds"])
    assert sum(bucket["bytes"] for bucket in result["buckets"]) == 4 * sum(
        parameter.numel() for parameter in traced_rank.model().parameters()
    )
    assert any(
        operator["operator"] == "aten::linear#3" and operator["backward"] > 0
        for operator in result["operators"]
    )


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model's profile on a T4, two plans, and a cluster."""
    folder = tmp_path_factory.mktemp("profiles")
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
    t4 = qsync_fx.devices.get("t4")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    x, formats = torch.randn(512, 1024), ("fp32", "fp16")
    profile = qsync_fx.catalog_profile(
        t4, model, lambda model, x: model(x).square().mean(), x, formats, optimizer
    )
    profile.save(folder / "t4.json")
    for name in ("fp32", "fp16"):
        Plan.uniform(name).save(folder / f"{name}.json")
    links = "[network]\nbandwidth = 1e9\nlatency = 1e-5\n"
    (folder / "fleet.toml").write_text(
        f"[devices.a]\nprofile = 't4.json'\n[devices.b]\nprofile = 't4.json'\n{links}"
    )
    return folder


def test_a_plan_on_a_device_of_the_catalog(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds, peaks = [], []
    for name in ("fp32", "fp16"):
        assert (
            main(
                ["replay", f"{profiled}/{name}.json", "--profile", f"{profiled}/t4.json", "--json"]
            )
            == 0
        )
        result = json.loads(capsys.readouterr().out)
        assert [row["name"] for row in result["devices"]] == ["t4"]
        assert {row["operator"] for row in result["operators"]} >= {
            "0/linear",
            "1/relu",
            "2/linear",
        }
        seconds.append(result["seconds"])
        peaks.append(result["devices"][0]["peak_bytes"])
    assert seconds[0] > seconds[1] > 0
    parameters = 2 * (2048 * 1024) + 2048 + 1024
    assert peaks[0] > 4 * 3 * parameters, "peak memory includes parameters, gradients and momentum"
    assert main(["replay", f"{profiled}/fp16.json", "--profile", f"{profiled}/t4.json"]) == 0
    assert "0/linear" in capsys.readouterr().out


def test_top_limits_the_number_of_operators(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["replay", f"{profiled}/fp16.json", "--profile", f"{profiled}/t4.json"]
    assert main([*arguments, "--json"]) == main([*arguments, "--json", "--operators", "1"]) == 0
    complete, cut = (
        json.loads(text) for text in capsys.readouterr().out.replace("}\n{", "}\0{").split("\0")
    )
    assert complete["operators"][:1] == cut["operators"] and len(complete["operators"]) > 1
    assert main([*arguments, "--operators", "0"]) == 0
    assert "4 more operators" in capsys.readouterr().out
    for more in ([], ["--json"]):
        assert main([*arguments, "--operators", "-3", *more]) == 2
        assert (
            "the number of operators is -3" in (printed := capsys.readouterr()).err
            and not printed.out
        )


def test_profile_of_another_machine_requires_confirmation(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = Profile.load(profiled / "t4.json", any_machine=True)
    other = replace(profile, machine=replace(profile.machine, device="cpu", name="another one"))
    other.save(profiled / "other.json")
    arguments = ["replay", f"{profiled}/fp16.json", "--profile", f"{profiled}/other.json"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert (
        "measured on another machine" in error
        and "other.json" in error
        and "--any-machine" in error
    )
    assert main([*arguments, "--any-machine"]) == 0
    assert main([*arguments[:-1], f"a={arguments[-1]}"]) == 0


def test_a_fleet_whose_profiles_the_cluster_names(
    profiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [f"a={profiled}/fp16.json", f"b={profiled}/fp32.json"]
    assert main(["replay", *plans, "--cluster", f"{profiled}/fleet.toml", "--json"]) == 0
    expected = capsys.readouterr().out
    together = profiled / "cluster plan.json"
    ClusterPlan(
        {"a": Plan.load(f"{profiled}/fp16.json"), "b": Plan.load(f"{profiled}/fp32.json")}
    ).save(together)
    for files in ([str(together)], [f"a={together}", f"b={profiled}/fp32.json"]):
        assert main(["replay", *files, "--cluster", f"{profiled}/fleet.toml", "--json"]) == 0
        assert capsys.readouterr().out == expected
    assert main(["replay", *plans, "--cluster", f"{profiled}/fleet.toml", "--json"]) == 0
    mixed = json.loads(capsys.readouterr().out)
    waiting = {device["name"]: device["waiting"] for device in mixed["devices"]}
    assert waiting["a"] > 0 == waiting["b"]
    assert mixed["buckets"][0]["bytes"] == 4 * (2048 * 1024 + 1024)
    assert (
        main(["replay", f"{profiled}/fp16.json", "--cluster", f"{profiled}/fleet.toml", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["seconds"] < mixed["seconds"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "neither a plan nor a trace is given"),
        (["a={plan}", "a={plan}"], "the name 'a' occurs twice"),
        (["{plan}", "{plan}"], "several values have no name"),
        (["a={plan}", "{plan}"], "one value has no name, but others have"),
        (["{plan}", "--trace", "x.json"], "a trace already contains its plan and durations"),
        (["--trace", "x.json", "--any-machine"], "a trace already contains its plan and durations"),
        (
            ["--trace", "x.json", "--execution-trace", "y.json", "z.json"],
            "2 execution traces for 1 traces",
        ),
        (["--trace", "{folder}/none.json"], "the trace cannot be read"),
        (["{folder}/none.json"], "the plan cannot be read"),
        (["{plan}", "--profile", "{folder}/none.json"], "the profile cannot be read"),
        (["{plan}", "--cluster", "{folder}/none.toml"], "the cluster cannot be read"),
    ],
)
def test_conflicting_arguments_are_rejected(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    Plan.uniform("int8").save(plan)
    assert main(["replay", *(text.format(plan=plan, folder=tmp_path) for text in arguments)]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and "do: " in printed.err and not printed.out
