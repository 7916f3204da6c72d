"""`qsync sensitivity`: table, comparison with real quantized passes, and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsync_fx.cli import main
from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity
from tests.support import tiers

MODEL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 8)), (torch.randn(16, 16),)

def function():
    return torch.relu, (torch.randn(4),)

def whole():
    return nn.Embedding(4, 4).requires_grad_(False), (torch.zeros(2, dtype=torch.long),)
"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sensed.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_table_and_file(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "sensitivity",
        "sensed:net",
        "--precisions",
        "bf16,int8",
        "--steps",
        "2",
        "--output",
        "s.json",
    ]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[1].split() == ["operator", "bf16", "of", "bf16", "int8", "of", "int8"]
    assert [line.split()[0] for line in lines[3:6]] == ["0/linear", "2/linear", "4/linear"]
    assert lines[7].startswith(
        "variance added to the gradients of Sequential, method second_order, mean over 2 steps"
    )
    assert "wrote s.json" in captured.err and not (workdir / "s.json.partial").exists()
    saved = Sensitivity.load(workdir / "s.json")
    assert saved.operators == ["0/linear", "2/linear", "4/linear"] and saved.steps == 2
    assert all(saved.of(name, "int8") > saved.of(name, "bf16") > 0 for name in saved.operators)


@tiers.ALL
def test_check_compares_methods_with_the_truth(
    workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["sensitivity", "sensed:net", "--precisions", "int8", "--steps", "4", "--check"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    index = next(
        index
        for index, line in enumerate(lines)
        if line.startswith("reference: mean square error of the gradients in real quantized passes")
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[index + 2 :]}
    assert list(rows) == ["second_order", "injected", "paper"]
    assert 0.4 < float(rows["second_order"][3]) < 2.5 and 0.4 < float(rows["injected"][3]) < 2.5
    assert float(rows["paper"][3]) > 10


@tiers.ALL
def test_json(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "sensitivity",
                "sensed:net",
                "--method",
                "paper",
                "--precisions",
                "int8",
                "--steps",
                "1",
                "--json",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["format"], result["method"], list(result["variance"])) == (
        "qsync-sensitivity",
        "paper",
        ["0/linear", "2/linear", "4/linear"],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sensed:net", "--method", "second_ordr"], "did you mean 'second_order'"),
        (["sensed:net", "--precision", "int8"], "use --precisions instead"),
        (["sensed:net", "--precisions", "int7"], "int7"),
        (["sensed:function"], "the model is a function without parameters"),
        (["sensed:whole"], "no parameter that requires a gradient"),
        (["sensed:net", "--fraction", "2"], "no part of a batch"),
        (["sensed:net", "--steps", "0"], "no batches"),
    ],
)
def test_invalid_arguments_are_rejected(
    workdir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["sensitivity", *arguments]) == 2
    assert message in capsys.readouterr().err
