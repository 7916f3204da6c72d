"""`qsync comm`: codec benchmarks on this CPU and predicted step times with compression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsync_fx.cli import main


def test_bench_reports_codec_speed_relative_to_memcpy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "comm",
        "bench",
        "--megabytes",
        "0.5",
        "--repeats",
        "2",
        "--codec",
        "qsgd8",
        "--codec",
        "1bit*",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed[0].startswith("0.5 MiB of FP32 gradients, 1 thread, ")
        and "2 runs; memcpy " in printed[0]
    )
    assert printed[2].split()[:1] == ["codec"]
    assert [line.split()[:2] for line in printed[3:]] == [["qsgd8", "8.062"], ["1bit*", "2.000"]]
    assert main([*arguments[:-4], "--codec", "aqgb"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "aqgb chooses its levels during training; here it sends all bits, as aqgb32 does."
    )
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in rows] == ["qsgd8", "1bit*"]
    assert all(
        row[kind] > 0 for row in rows for kind in ("encode", "decode", "copy", "encode_to_copy")
    )


def test_bench_rejects_invalid_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comm", "bench", "--codec", "duo4"]) == 2
    assert "duo4 is a DUO optimizer mode, not a codec" in capsys.readouterr().err
    assert main(["comm", "bench", "--codec", "qsgd9"]) == 2
    assert "did you mean 'qsgd" in capsys.readouterr().err
    assert main(["comm", "bench", "--repeats", "0"]) == 2
    assert "repeats is 0" in capsys.readouterr().err


MODEL = """
import torch
from torch import nn

def wide():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)), (torch.randn(64, 512),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "wide_of_test.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "wide_of_test:wide"


def test_predict_recommends_the_fastest_codec(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["comm", "predict", model, "--gpus", "16"]
    assert main([*arguments, "--bandwidth", "1gbit"]) == 0
    output = capsys.readouterr().out
    assert "on 16 devices: NVIDIA T4" in output
    assert "links of 1 Gbit/s" in output
    assert " pays: " in output
    assert "Do not compress" not in output
    assert main([*arguments, "--bandwidth", "1gbit", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["codec"]: row for row in result["codecs"]}
    assert result["best"] in rows
    assert (
        rows[result["best"]]["seconds"]
        == min(row["seconds"] for row in rows.values())
        < rows["none"]["seconds"]
    )
    values = 2 * 512 * 2048 + 2048 + 512
    assert rows["none"]["bytes"] == pytest.approx(2 * 15 / 16 * 4 * values)
    assert rows["qsgd8"]["bytes"] == pytest.approx(rows["none"]["bytes"] * 8.0625 / 32, rel=0.01)
    assert rows["qsgd4"]["pays_below"] > 1e9
    assert 0 <= rows["none"]["hidden"] <= 1


def test_predict_knows_nodes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "comm",
        "predict",
        model,
        "--gpus",
        "16",
        "--bandwidth",
        "1gbit",
        "--codec",
        "qsgd8",
        "--codec",
        "fp16",
    ]
    nodes = [*arguments, "--gpus-per-node", "4", "--inside", "100gbit"]
    assert main(nodes) == 0
    output = capsys.readouterr().out
    assert "links of 1 Gbit/s between nodes of 4, 100 Gbit/s inside" in output
    assert "sent by a node" in output
    assert "compress(..., hierarchical=True)" in " ".join(output.split())
    assert main([*nodes, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ranks_a_node"], result["bits_a_second_inside"]) == (4, 1e11)
    assert result["transport"] == "collective" and "to the host" not in result["rates"]
    assert main([*nodes, "--json", "--transport", "point_to_point"]) == 0
    by_host = json.loads(capsys.readouterr().out)
    assert "to the host" in by_host["rates"]
    pairs = zip(result["codecs"], by_host["codecs"], strict=True)
    assert all(
        device_row["coding"] < host_row["coding"] for device_row, host_row in [*pairs][1:]
    ), "coding on the device needs no copies to the host"
    rows = {row["codec"]: row for row in result["codecs"]}
    values = 2 * 512 * 2048 + 2048 + 512
    assert rows["none"]["bytes"] == rows["none"]["bytes_inside"] == pytest.approx(1.5 * 4 * values)
    assert rows["qsgd8"]["bytes"] == pytest.approx(rows["none"]["bytes"] * 8.0625 / 32, rel=0.01)
    assert rows["qsgd8"]["bytes_inside"] == pytest.approx(rows["none"]["bytes_inside"], rel=0.01)
    assert main([*nodes, "--codec", "qsgd8/qsgd4", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["codecs"][-1]
    assert both["codec"] == "qsgd8/qsgd4" and both["bytes"] == rows["qsgd8"]["bytes"]
    assert both["bytes_inside"] == pytest.approx(1.5 * values * 4.0625 / 8, rel=0.01)
    for wrong, text in (
        (
            ["--gpus-per-node", "3", "--inside", "1gbit"],
            "16 devices cannot be divided into several nodes of 3",
        ),
        (
            ["--gpus-per-node", "16", "--inside", "1gbit"],
            "16 devices cannot be divided into several nodes of 16",
        ),
        (["--gpus-per-node", "4"], "require each other"),
        (["--inside", "1gbit"], "require each other"),
        (["--gpus-per-node", "4", "--inside", "fast"], "'fast' is not a bandwidth"),
        (["--transport", "collectiv"], "did you mean 'collective'?"),
        (["--codec", "qsgd8/qsgd4"], "has a codec inside nodes, but each device is a node"),
    ):
        assert main([*arguments, *wrong]) == 2
        assert text in capsys.readouterr().err


def test_predict_recommends_no_compression_without_a_gain(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["comm", "predict", model, "--gpus", "2", "--bandwidth", "100tbit", "--codec", "qsgd8"]
        )
        == 0
    )
    output = capsys.readouterr().out
    assert "Do not compress: no codec shortens a step." in output
    assert "A codec would pay below" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpus", "1", "--bandwidth", "1gbit"],
            "gradients are exchanged between at least 2 devices",
        ),
        (["--gpus", "2", "--bandwidth", "fast"], "'fast' is not a bandwidth"),
        (["--gpus", "2", "--bandwidth", "0gbit"], "'0gbit' is not a bandwidth"),
        (["--gpus", "2", "--bandwidth", "1gbit"], "neither a model nor a profile is given"),
        (
            ["--gpus", "2", "--bandwidth", "1gbit", "--plan", "plan.json"],
            "qsync comm predict uses one format for all operators",
        ),
        *(
            (
                ["--gpus", "2", "--bandwidth", "1gbit", *option.split()],
                f"the command does not use {option.split()[0]}",
            )
            for option in ("--rounding floor", "--cudagraphs", "--recipe int8_fast")
        ),
    ],
)
def test_predict_rejects_invalid_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["comm", "predict", *arguments]) == 2
    assert message in capsys.readouterr().err
