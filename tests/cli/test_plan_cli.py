"""`qsync plan`: plans from files and models, output, and errors for conflicting arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qsync_fx
from qsync_fx import ClusterPlan, Plan
from qsync_fx.cli import main
from tests.support import tiers

MODEL = """
import torch

def small():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    return model, (torch.randn(256, 512),)
"""
FLEET = (
    "[devices.v100]\ndevice = 'v100'\nbatch = 256\n[devices.t4]\ndevice = 't4'\nbatch = 256\n"
    "[network]\nbandwidth = 1e11\n"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a T4 profile, the sensitivity, and a cluster of a T4 and a T4 at half speed."""
    folder = tmp_path_factory.mktemp("plans")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    x, formats = torch.randn(512, 1024), ("fp32", "fp16")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    qsync_fx.catalog_profile("t4", model, step, x, formats, optimizer).save(folder / "t4.json")
    sensitivity = qsync_fx.sensitivity(
        model, step, [x], precisions=["fp16"], steps=2, options={"target": "t4"}
    )
    sensitivity.save(folder / "sensitivity.json")
    links = "[network]\nbandwidth = 1e10\nlatency = 1e-5\n"
    both = (
        "[devices.a]\nprofile = 't4.json'\nbatch = 512\n[devices.b]\nprofile = 't4.json'\n"
        "slowdown = 2\nbatch = 512\n"
    )
    (folder / "fleet.toml").write_text(both + links)
    return folder


def planned(files: Path, *more: str) -> list[str]:
    return [
        "plan",
        "--cluster",
        f"{files}/fleet.toml",
        "--sensitivity",
        f"{files}/sensitivity.json",
        *more,
    ]


def placed(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Write modules to a folder, and make it the working directory and importable."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))


def formats(plan: Plan) -> set[str]:
    return {str(fmt) for fmt in plan.operators.values()}


def test_a_plan_for_a_cluster(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    assert main(planned(files, "-o", str(out))) == 0
    printed = capsys.readouterr()
    assert "a step of" in printed.out and "milp" in printed.out and f"wrote {out}" in printed.err
    plan = ClusterPlan.load(out)
    assert set(plan.classes) == {"a", "b"}
    assert main(planned(files, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["plans"]["a"].values()) == {"fp32"}
    assert "fp16" in result["plans"]["b"].values()
    assert result["fits"] and result["classes"]["b"]["computing"] > 0


def test_a_cluster_of_the_paper_by_its_name(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profiles = [f"--profile={name}={files}/t4.json" for name in ("v100", "t4")]
    arguments = [*profiles, "--sensitivity", f"{files}/sensitivity.json", "--json"]
    results = {}
    for name in ("cluster-a", "cluster-b"):
        assert main(["plan", "--cluster", name, *arguments]) == 0
        results[name] = json.loads(capsys.readouterr().out)
    memory = {
        name: [result["classes"][device]["memory"] for device in ("v100", "t4")]
        for name, result in results.items()
    }
    t4 = qsync_fx.devices.get("t4").memory.bytes
    assert memory == {"cluster-a": [None, None], "cluster-b": [None, pytest.approx(0.3 * t4)]}
    assert results["cluster-a"]["fits"]
    assert main(["plan", "--cluster", "cluster-c", *arguments]) == 2
    assert "did you mean 'cluster-b'? known: cluster-a, cluster-b" in capsys.readouterr().err


def test_plan_command_runs_the_requested_analyses(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    options = [
        "--compare",
        "--explain",
        "0/linear",
        "--set",
        "0/linear=fp32",
        "--set",
        "2/linear=fp32",
        "--pareto",
    ]
    assert main(planned(files, *options, "--points", "3", "-o", str(out))) == 0
    printed = capsys.readouterr()
    for part in (
        "paper",
        "uniform-fp16",
        "why not",
        "before",
        "uniform fp32",
    ):
        assert part in printed.out, part
    assert "the comparison omits dynamic batches" in printed.err
    assert formats(ClusterPlan.load(out).classes["b"]) == {"fp32"}
    assert main(planned(files, "--pareto", "--points", "2")) == 0
    assert "uniform fp32" in capsys.readouterr().out
    assert main(planned(files, *options, "--points", "3", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert {step["format"] for step in result["explain"][0]} == {"fp16", "fp32"}
    assert result["changed"]["exceeds"]["seconds"] > 0
    assert {row["allocator"] for row in result["compared"]} >= {
        "milp",
        "paper",
        "uniform-fp16",
    }
    assert len(result["pareto"]["points"]) >= 2


@pytest.mark.parametrize("name", ["paper", "uniform"])
def test_other_allocators(files: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(planned(files, "--allocator", name, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["allocator"] == name and result["fits"]


def test_one_device(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    base = [
        "plan",
        "--profile",
        f"{files}/t4.json",
        "--sensitivity",
        f"{files}/sensitivity.json",
        "-o",
        str(out),
    ]
    assert main([*base, "--budget", "0"]) == 0
    assert formats(Plan.load(out)) == {"fp32"}
    assert main([*base, "--budget", "fp16", "--memory", "1 GB"]) == 0
    assert "fp16" in formats(Plan.load(out))
    capsys.readouterr()
    assert main([*base, "--memory", "1 MB"]) == 2
    assert "MB" in capsys.readouterr().err


def test_patterns_select_operators_as_in_plans(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    both = [
        "--set",
        "*=fp16",
        "--set",
        "2/linear=fp32",
        "--explain",
        "{0,2}",
        "--explain",
        "0/linear",
    ]
    assert main(planned(files, *both, "--device", "b", "-o", str(out), "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert [steps[0]["operator"] for steps in result["explain"]] == ["0/linear", "2/linear"], (
        "each operator is explained once"
    )
    plan = ClusterPlan.load(out).classes["b"]
    assert {str(op): str(fmt) for op, fmt in plan.operators.items()} == {
        "0/linear": "fp16",
        "2/linear": "fp32",
    }
    for more, message in (
        (["--set", "encoder.*=fp32"], "that a plan decides on"),
        (["--explain", "[0"], "[0"),
    ):
        assert main(planned(files, *more, "--device", "b")) == 2
        assert message in capsys.readouterr().err


NET = """
import torch

def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(16, 8, bias=False), (torch.randn(4, 16),)
"""


def test_a_model_alone_is_measured_and_its_plan_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    placed(tmp_path, monkeypatch, net_at_hand=NET)
    arguments = ["net_at_hand:linear", "--precisions", "fp32,bf16", "--optimizer", "sgd"]
    assert main(["plan", *arguments, "--repeats", "2", "-o", "plan.json"]) == 0
    printed = capsys.readouterr().out
    assert "cpu ran " in printed and "in round 1 of " in printed and " measured (" in printed
    plan = Plan.load("plan.json")
    assert list(map(str, plan.operators)) == ["/linear"] and int(plan.notes["plans measured"]) <= 2
    assert float(plan.notes["seconds measured"]) > 0
    assert main(["measure", *arguments, "--repeats", "2", "--output", "cpu.json"]) == 0
    capsys.readouterr()
    for more in (["net_at_hand:linear", "--repeats", "0"], []):
        assert main(["plan", *more, "--profile", "cpu.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["trials"] == [], (
            "no plan is run without a model or with --repeats 0"
        )
    assert main(["plan", "--profile", "cpu.json", "--repeats", "1"]) == 2
    assert "--max-replans runs the plan, which requires the model" in capsys.readouterr().err


def test_infeasible_memory_is_reported_before_sensitivities_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    placed(tmp_path, monkeypatch, nets_that_do_not_fit=MODEL)
    (tmp_path / "fleet.toml").write_text(FLEET)

    def never(*_: object) -> None:
        raise AssertionError("minutes are spent on what no plan keeps")

    monkeypatch.setattr("qsync_fx.cli.plan_inputs.sensitivities", never)
    arguments = [
        "plan",
        "nets_that_do_not_fit:small",
        "--cluster",
        "fleet.toml",
        "--memory",
        "t4=1 MB",
    ]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "a step on 't4' takes" in error and "memory of 't4', 1 MB" in error
    with pytest.raises(AssertionError):
        main([*arguments[:-1], "t4=1 GB"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither a model nor a profile"),
        (["--profile", "a=x.json", "--profile", "a=y.json"], "occurs twice"),
        (["--set", "0/linear"], "contains no format"),
        (["--plan", "plan.json"], "qsync plan computes a plan and does not accept one"),
    ],
)
def test_arguments_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


LOUD = """
import torch

class Loud(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        raise AssertionError("the model ran")

def loud():
    return Loud(), (torch.randn(2, 4),)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--allocator exakt", "no allocator"),
        ("--allocator dynamic-batches", "requires arguments"),
        ("--max-replans -1", "cannot be run in -1 rounds"),
        ("--codecs qsgd5", "no codec 'qsgd5'"),
        ("--codecs qsgd8 --inside-codecs 1bit", "no codec '1bit' inside nodes"),
        ("--inside-codecs qsgd8", "only with codecs between nodes"),
        ("--margin 2", "no plan leaves a margin of 2"),
        ("--memory 4GBB", "'4GBB' is no memory"),
        ("--budget bf17", "bf17"),
        ("--precisions int9", "int9"),
        ("--optimizer adamv", "torch.optim has no optimizer 'adamv'"),
        ("--set linear=int9", "int9"),
        ("--pareto --points 1", "a front cannot have 1 points"),
        ("--cluster fleet.toml --device t5", "the cluster has no class of devices 't5'"),
        ("--cluster fleet.toml --memory t5=1GB", "the cluster has no class of devices 't5'"),
    ],
)
def test_wrong_arguments_are_refused_before_the_model_runs(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    placed(tmp_path, monkeypatch, loud_nets=LOUD)
    (tmp_path / "fleet.toml").write_text(FLEET)
    assert main(["plan", "loud_nets:loud", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan --plan plan.json", "qsync plan computes a plan and does not accept one"),
        ("plan --precision int8", "a plan covers several precisions"),
        ("plan --set linear", "contains no format"),
        ("plan --cluster fleet.toml", "unknown device 't44'"),
        ("plan --cluster misspelt.toml", "bandwith"),
        ("plan --cluster missing.toml", "cannot be read"),
        ("plan --cluster syntax.toml", "not valid TOML"),
        ("replay plan.json --cluster fleet.toml", "unknown device 't44'"),
        ("replay --trace trace.json --cluster misspelt.toml", "bandwith"),
        ("measure --precision int8", "a profile covers several precisions"),
        ("sensitivity --plan plan.json", "a sensitivity does not depend on a plan"),
        (
            "comm predict --gpus 2 --bandwidth 1gbit --plan plan.json",
            "qsync comm predict uses one format for all operators",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_torch_is_imported(
    arguments: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "fleet.toml").write_text("[devices.t4]\ndevice = 't44'\n")
    (tmp_path / "syntax.toml").write_text("[devices")
    (tmp_path / "misspelt.toml").write_text(
        "[devices.t4]\ndevice = 't4'\n[network]\nbandwith = 1e9\n"
    )
    code = (
        "import sys\nfrom qsync_fx.cli import main\n"
        f"status = main({arguments.split()})\nassert 'torch' not in sys.modules\nsys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("verb", "refused"),
    [
        ("plan", "plan"),
        ("plan", "precision"),
        ("plan", "skip-unprofitable"),
        ("measure", "precision"),
        ("measure", "skip-unprofitable"),
        ("sensitivity", "plan"),
    ],
)
def test_help_lists_no_refused_option(
    verb: str, refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert not re.search(rf"--{refused}[\s\]]", capsys.readouterr().out)
    assert main([verb, f"--{refused}"]) == 2
    assert f"--{refused}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    "measure sensitivity plan tune report inspect replay comm doctor docs kernels|list "
    "kernels|build".split(),
)
def test_help_texts_are_for_the_command_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help texts show no Python values, and no repository paths, which a package does not have."""
    with pytest.raises(SystemExit):
        main([*words.split("|"), "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert not re.search(r"(True|False): |docs/|\.md\b|README", text)


def test_wrong_names(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, message in (
        (["--allocator", "exakt"], "no allocator"),
        (["--objective", "hybird"], "no objective"),
        (["--explain", "0/linaer"], "did you mean"),
    ):
        assert main(planned(files, *more)) == 2
        assert message in capsys.readouterr().err


@tiers.ALL
def test_a_model_on_devices_of_the_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    placed(tmp_path, monkeypatch, nets_to_plan=MODEL)
    (tmp_path / "fleet.toml").write_text(FLEET)
    assert (
        main(
            [
                "plan",
                "nets_to_plan:small",
                "--cluster",
                "fleet.toml",
                "--compare",
                "--json",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert set(result["plans"]) == {"v100", "t4"}
    compared = {row["allocator"]: row for row in result["compared"]}
    assert {
        "milp",
        "paper",
        "dynamic-batches",
        "uniform-fp16",
    } <= compared.keys()
    assert compared["dynamic-batches"]["seconds"] < compared["uniform-fp32"]["seconds"]
    assert compared["milp"]["variance"] <= compared["paper"]["variance"] * 1.0001
    assert compared["milp"]["fits"] and compared["paper"]["fits"]


def test_batches_are_planned_within_a_step_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    placed(tmp_path, monkeypatch, nets_to_plan=MODEL)
    (tmp_path / "fleet.toml").write_text(FLEET)
    fleet = ["plan", "nets_to_plan:small", "--cluster", "fleet.toml", "--target", "fp16", "--json"]
    results = []
    for batches in ([], ["--batch", "global", "--min-batch", "32", "--output", "joint.json"]):
        assert main([*fleet, *batches]) == 0
        results.append(json.loads(capsys.readouterr().out))
    equal, joint = results
    assert joint["batches"]["t4"] < joint["batches"]["v100"]
    assert sum(joint["batches"].values()) == 512 and min(joint["batches"].values()) >= 32
    assert joint["variance"] <= equal["variance"]
    assert ClusterPlan.load(tmp_path / "joint.json").batches == joint["batches"]


def test_recomputation_is_planned_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    placed(tmp_path, monkeypatch, nets_to_plan=MODEL)
    (tmp_path / "fleet.toml").write_text(FLEET)
    fleet = ["plan", "nets_to_plan:small", "--cluster", "fleet.toml", "--json"]
    assert main([*fleet, "--recompute"]) == 0
    free = json.loads(capsys.readouterr().out)
    assert free["memory_budgets"] == {} and free["batches"] == {}
    peak = free["classes"]["t4"]["peak_bytes"]
    memory = f"t4={peak / 1e9:.9f} GB"
    assert main([*fleet, "--batch", "global", "--recompute", "--memory", memory]) == 0
    limited = json.loads(capsys.readouterr().out)
    assert limited["classes"]["t4"]["peak_bytes"] <= peak
    assert limited["memory_budgets"].keys() <= {"t4"}
    assert main([*fleet, "--recompute", "--max-replans", "1"]) == 2
    assert "a plan with --recompute cannot be run" in capsys.readouterr().err


def test_expensive_devices_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    placed(tmp_path, monkeypatch, nets_to_plan=MODEL)
    priced = FLEET.replace("batch = 256\n", "batch = 256\nprice_per_hour = 0.4\n")
    (tmp_path / "fleet.toml").write_text(priced.replace("0.4", "400.0", 1))
    arguments = ["nets_to_plan:small", "--cluster", "fleet.toml", "--objective", "cost"]
    assert main(["plan", *arguments, "--json", "--output", "plan.json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plans"].keys() == {"t4"}
    assert answer["samples_per_price"] > 0
    kinds = {(note["kind"], note["device"]) for note in answer["notes"]}
    assert {("not_used", "v100"), ("subset", "v100 and t4"), ("subset", "t4")} <= kinds
