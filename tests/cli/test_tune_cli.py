"""`qsync tune` with recorded timings instead of a GPU, and products of the event timer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from qsync_fx.backend.cuda import tuning
from qsync_fx.backend.cuda.layer_times import LayerTimes, layer_problem
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.runtime import event_timer
from qsync_fx.backend.cuda.selection.select import decide, dispatch_path
from qsync_fx.backend.cuda.tuning import Environment, TimingRecording
from qsync_fx.cli import main
from tests.support.cuda.tuning_samples import problem_from

HERE = Environment("NVIDIA A100", "570.86", "13.0", "2.13.0", "4.2.0", 1)
MODEL = """
import torch
from torch import nn

def tiny():
    return nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128)), (torch.randn(96, 512),)

def plain():
    return nn.ReLU(), (torch.randn(4),)
"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a model and an empty cache."""
    (tmp_path / "tunable.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def run(*arguments: str) -> int:
    return main(("tune", *arguments))


LAYER = GemmProblem(
    96, 256, 512, "int8", "int8", "bf16", a_scale="tensor", b_scale="tensor", bias=True
)


def names(problem: Problem) -> list[str]:
    selection = dispatch_path(problem, "sm_80")
    return [] if isinstance(selection, str) else [config.name for config in selection.configs]


def problems(capsys: pytest.CaptureFixture[str]) -> list[Problem]:
    """Return the problems of the model that `qsync tune` reports as skipped."""
    empty = Path("empty.json")
    tuning.save_recording(empty, TimingRecording(HERE, "sm_80", {}))
    assert run("tunable:tiny", "--precision", "int8", "--recorded", "empty.json", "--json") == 0
    return [problem_from(row["problem"]) for row in json.loads(capsys.readouterr().out)["skipped"]]


def test_tune_without_a_gpu_is_an_error(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run("tunable:tiny", "--precision", "int8") == 2
    error = capsys.readouterr().err
    assert "there is no GPU cuda" in error and "--recorded" in error
    assert not (workdir / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--repeats", "0"), "the number of measurements is 0"),
        (("--recorded", "a", "--record", "b"), "remove one of them"),
        (("--recorded", "missing.json"), "No such file"),
        (("--device", "gpu"), "is not a device"),
        (("--device", "cpu"), "no GPU cpu"),
    ],
)
def test_tune_rejects_unsupported_options(
    workdir: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run("tunable:tiny", *arguments) == 2
    assert message in capsys.readouterr().err


def test_recorded_timings_decide(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    all_problems = problems(capsys)
    # Output and weight gradient of both layers, input gradient of the second; and the BF16 products
    # that they are compared with.
    assert [p for p in all_problems if p.a == "int8"] == [
        LAYER,
        next(p for p in all_problems if p.a == "int8" and p != LAYER),
    ]
    assert len(all_problems) == 7
    timings: dict[Problem, dict[str, list[float]]] = {p: {"torch": [10e-6]} for p in all_problems}
    third = names(LAYER)[2]
    timings[LAYER] |= {name: [9e-6] for name in names(LAYER)} | {third: [5e-6, 6e-6, 4e-6]}
    tuning.save_recording(Path("a100.json"), TimingRecording(HERE, "sm_80", timings))

    tuned = "tunable:tiny", "--precision", "int8", "--recorded", "a100.json"
    assert run(*tuned, "--output", "table.json") == 0
    printed = capsys.readouterr()
    lines = [
        line for line in printed.out.splitlines() if line.startswith("gemm 96 x 256 x 512 nt int8")
    ]
    assert (
        len(lines) == 1
        and "10.0" in lines[0]
        and "5.0" in lines[0]
        and "2.00" in lines[0]
        and third in lines[0]
    )
    assert "wrote table.json" in printed.err

    table = tuning.load_table(Path("table.json"))
    choice = table.choices[LAYER]
    assert table.environment == HERE and choice.name == third and choice.faster_than_bf16 is True
    config = decide(LAYER, "sm_80", table).config
    assert config is not None and config.name == third
    # --output replaces the table in the cache.
    assert not (workdir / "cache" / "tuning").exists()

    assert run(*tuned, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["environment"] == asdict(HERE)
        and result["arch"] == "sm_80"
        and not result["skipped"]
    )
    assert {row["name"] for row in result["choices"]} == {"torch", third}


def test_recorded_layers_decide(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layer whose total time is not shorter than in BF16 stays in BF16."""
    timings = {p: {"torch": [10e-6]} for p in problems(capsys)}
    bf16, times = layer_problem(LAYER, "bf16"), {"forward": 1e-6, "weight_gradient": 2e-6}
    slower = LayerTimes(bf16, "int8", {"forward": 2e-6, "weight_gradient": 2e-6}, times)
    other = LayerTimes(bf16, "fp8", times, times)
    layers = tuning.by_layer([slower, other])
    tuning.save_recording(Path("a100.json"), TimingRecording(HERE, "sm_80", timings, layers))
    tuned = "tunable:tiny", "--precision", "int8", "--recorded", "a100.json"
    assert run(*tuned, "--output", "table.json") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "by default" in line]
    assert line.split()[-8:-5] == ["0.50", "1.00", "0.75"] and "stays in bf16" in line
    assert list(tuning.load_table(Path("table.json")).layers.values()) == [slower]
    assert run(*tuned, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["layers"]
    assert row["precision"] == "int8" and row["wide_seconds"] == times


def test_int8_slower_than_bf16_is_reported_and_not_used(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timings = {p: {"torch": [10e-6 if p.a == "int8" else 1e-6]} for p in problems(capsys)}
    tuning.save_recording(Path("t4.json"), TimingRecording(HERE, "sm_80", timings))
    assert (
        run(
            "tunable:tiny", "--precision", "int8", "--recorded", "t4.json", "--output", "table.json"
        )
        == 0
    )
    assert capsys.readouterr().out.count("not faster than bf16, so int8 is not used") == 2
    decision = decide(LAYER, "sm_80", tuning.load_table(Path("table.json")))
    assert decision.config is None and not decision.integers


def test_model_without_products_has_no_problem_to_tune(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning.save_recording(Path("empty.json"), TimingRecording(HERE, "sm_80", {}))
    assert run("tunable:plain", "--recorded", "empty.json") == 2
    assert "torch computes every product" in capsys.readouterr().err


# Products of the event timer, run on the CPU.

WINDOW: dict[str, Any] = {"padding": (1, 1), "stride": (1, 1), "dilation": (1, 1)}
MEASURED = [
    LAYER,
    GemmProblem(33, 24, 40, "int8", "int8", "fp32", a_scale="channel", b_scale="channel"),
    GemmProblem(32, 48, 64, "bf16", "bf16", "bf16", "row", "row"),
    GemmProblem(32, 48, 64, "bf16", "bf16", "fp32", "column", "row", a_scale="tensor"),
    GemmProblem(32, 48, 64, "tf32", "tf32", "fp32", "column", "row"),
    GemmProblem(32, 48, 64, "fp8_e5m2", "fp8", "bf16", a_scale="tensor", b_scale="tensor"),
    GemmProblem(32, 48, 60, "fp8", "fp8", "fp32", "row", "row"),
    ConvProblem(
        "fprop",
        2,
        6,
        5,
        16,
        32,
        3,
        3,
        a="int8",
        b="int8",
        out="bf16",
        a_scale="tensor",
        bias=True,
        **WINDOW,
    ),
    ConvProblem("dgrad", 2, 6, 5, 16, 32, 3, 3, a="bf16", b="bf16", out="bf16", **WINDOW),
    ConvProblem(
        "wgrad", 2, 6, 5, 16, 32, 3, 3, a="bf16", b="bf16", out="fp32", a_scale="tensor", **WINDOW
    ),
]


@pytest.mark.parametrize("problem", MEASURED, ids=str)
def test_peers_compute_the_product(problem: Problem) -> None:
    """The result has the output format; values are compared for at most one scale and no bias."""
    operands = event_timer.operands(problem, torch.device("cpu"))
    result = event_timer.peer(problem, operands)()
    if not problem.bias and None in (operands.a_scale, operands.b_scale):
        assert event_timer.differs(result, operands) == ""
    assert (
        str(result.dtype).removeprefix("torch.")
        == {"bf16": "bfloat16", "fp32": "float32"}[problem.out]
    )


@pytest.mark.parametrize(
    "break_it",
    [
        lambda t: t.roll(1, 0),
        lambda t: t * 1.1,
        torch.zeros_like,
        lambda t: t.clone().fill_(float("nan")),
    ],
)
def test_wrong_results_are_detected(break_it: Callable[[torch.Tensor], torch.Tensor]) -> None:
    problem = MEASURED[2]
    operands = event_timer.operands(problem, torch.device("cpu"))
    expected = event_timer.peer(problem, operands)()
    assert event_timer.differs(expected, operands) == ""
    assert "its largest error" in event_timer.differs(break_it(expected), operands)
