"""Experiments of benchmarks/paper: a pair of ranks in one process, cached runs, figures, trainings
with codecs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import colors
from torch import Tensor, nn

from benchmarks import plots
from benchmarks.paper import codec_parameters, fig6, table3
from benchmarks.paper.support import codec_trainings, devices, text
from benchmarks.paper.support.pair import Pair
from benchmarks.paper.support.run_cache import RunCache
from benchmarks.support.harness import write_json
from qsync_fx.allocator import PlanEvaluator
from qsync_fx.communication.codecs.codec import Codec, Draw
from tests.support import experiment_tables, tiers
from tests.support.distributed import pair_rank
from tests.support.planning.allocation_problems import fleet
from tests.support.processes import forks
from tests.support.processes.ranks import ENVIRONMENT

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "benchmarks" / "paper"


@tiers.ALL
def test_pair_in_one_process_is_bit_equal_to_two_ranks(tmp_path: Path) -> None:
    environment, script = {**os.environ, **ENVIRONMENT}, Path(pair_rank.__file__)
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    ranks = [
        forks.start(script, [str(rank), str(tmp_path)], environment, logs[rank]) for rank in (0, 1)
    ]
    assert forks.ended(ranks, 250) == [0, 0], [log.read_text() for log in logs]
    torch.set_num_threads(1)  # as the ranks; the count changes the order of sums
    model = pair_rank.network()
    pair = Pair(model, pair_rank.PLANS, pair_rank.loss_of)
    optimizer = pair_rank.optimizer_of(model)
    for step in range(pair_rank.STEPS):
        pair.backward(pair_rank.parts(step))
        optimizer.step()
        optimizer.zero_grad()
    for rank, replica in enumerate(pair.replicas):
        state = torch.load(tmp_path / f"rank{rank}.pt")
        assert state.keys() == replica.state_dict().keys()
        for name, tensor in replica.state_dict().items():
            assert torch.equal(tensor, state[name]), (rank, name)
    first, second = (dict(replica.named_buffers()) for replica in pair.replicas)
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"]), (
        "each replica has separate batch statistics"
    )


@tiers.ALL
def test_plan_of_the_wide_network_covers_the_trained_operators() -> None:
    batch = (torch.randn(16, 8), torch.randn(16, 4))

    def network(width: int, *more: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4), *more)

    def step(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def look(wide: nn.Module) -> devices.AnalyzedNetwork:
        return devices.analyze(network(4), wide, step, [batch], [batch[0][:2]], ("second_order",))

    analysis = look(network(64))
    assert max(parameter.numel for parameter in analysis.graphs["t4"].parameters) == 8 * 64, (
        "the plan is for the wide network"
    )
    perturbed = {
        name
        for name, by in analysis.sensitivities["second_order"].variance.items()
        if by["int8"] > 0
    }
    assert len(perturbed) == 2
    assert set(devices.problem(analysis, 16).uniform("int8")["t4"]) == perturbed
    with pytest.raises(ValueError, match="different operators"):
        look(network(64, nn.Linear(4, 4)))


def test_completed_runs_are_cached_by_their_settings(tmp_path: Path) -> None:
    path, ran = tmp_path / "partial.json", []

    def run() -> int:
        ran.append(1)
        return len(ran)

    assert RunCache(path).get({"seed": 0}, run) == 1
    assert RunCache(path).get({"seed": 0}, run) == 1
    assert RunCache(path).get({"seed": 1}, run) == 2
    assert {"seed": 1} in RunCache(path)
    assert {"seed": 2} not in RunCache(path)
    assert RunCache(None).get({"seed": 1}, run) == 3


def test_timeline_picture_is_proportional_to_time() -> None:
    problem = fleet("mlp")
    timeline = PlanEvaluator(problem, problem.uniform("bf16")).timeline
    axes, _ = fig6.draw({"bf16": timeline, "again": timeline}).axes
    bars = list(axes.patches)
    for kind in ("waiting", "sending", "optimizer"):
        color = colors.to_rgba(fig6.COLORS[kind])
        drawn_ms = sum(bar.get_width() for bar in bars if bar.get_facecolor() == color)
        tracks = [*timeline.computing.values(), *timeline.communicating.values()]
        seconds = sum(
            piece.end - piece.begin for track in tracks for piece in track if piece.kind == kind
        )
        assert drawn_ms == pytest.approx(1e3 * seconds), kind
        assert seconds > 0


@tiers.ALL
def test_texts_are_the_same_each_time_and_none_is_trained_and_tested() -> None:
    first, second = text.load(8, text.FEW), text.load(8, text.FEW)
    assert torch.equal(first.train[0], second.train[0])
    rows = [tuple(row.tolist()) for row in (*first.train[0], *first.test[0])]
    assert len(rows) == len(text.PACKAGES) * 8
    assert len(first.test[1]) == len(rows) // 5
    assert set(first.train[1].tolist()) <= set(range(len(text.PACKAGES)))
    trained, tested = (
        {tuple(row.tolist()) for row in split[0]} for split in (first.train, first.test)
    )
    assert not trained & tested


def test_curves_have_one_color_per_series() -> None:
    series = {"a": [(0.0, 3.0), (10.0, 1.0)], "b": [(5.0, 2.0)]}
    panels = plots.curves({"one": series, "two": {"b": series["b"]}}, "across", "up").axes
    lines = {
        (axes.get_title("left"), line.get_label()): line for axes in panels for line in axes.lines
    }
    assert lines["one", "a"].get_xydata().tolist() == [[0.0, 3.0], [10.0, 1.0]]
    assert lines["one", "b"].get_color() == lines["two", "b"].get_color()


def test_table_three_is_on_the_page_once_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment_tables, "RESULTS", tmp_path)
    assert experiment_tables.table3() == "Not measured at size."
    errors = {"cost mapper": (-1.0, 3.0), "dPRO's view": (-9.0, -11.0)}
    repeats = [
        {
            "in BF16": {
                "seconds": 0.5 + i,
                **{view: percents[i] for view, percents in errors.items()},
            }
        }
        for i in range(2)
    ]
    write_json(tmp_path / "table3.json", list(table3.rows(repeats)))
    last = experiment_tables.table3().splitlines()[-1]
    assert last == "| in BF16 | 1000 ms | 2.0% (-1.0, +3.0) | 10.0% (-9.0, -11.0) |"


@tiers.ALL
def test_networks_are_trained_with_codecs_and_fp32(tmp_path: Path) -> None:
    methods = ("qsgd2", "duo4", "powerSGD_hook")
    options = [option for method in methods for option in ("--method", method)]
    rows = rows_of("codec_accuracy", "LSTM", options, tmp_path)
    assert rows.keys() == {"fp32", *methods}
    assert rows["fp32"]["points"] == 0.0
    losses = {method: row["loss"] for method, row in rows.items()}
    assert len({loss[0] for loss in losses.values()}) == 1, (
        "all runs begin with the same weights and batch"
    )
    assert losses["qsgd2"] != losses["fp32"] != losses["duo4"], "codecs change the losses"
    assert 0.06 < rows["qsgd2"]["sent"] < 0.1 < rows["duo4"]["sent"] < 0.15


@tiers.ALL
def test_codec_parameters_change_bytes_and_noise(tmp_path: Path) -> None:
    rows = rows_of("codec_parameters", "ResNet", [], tmp_path)
    assert rows.keys() == {"fp32", *codec_parameters.CODECS}
    sent = {method: row["sent"] for method, row in rows.items() if method != "fp32"}
    noise = {method: row["noise"] for method, row in rows.items() if method != "fp32"}
    assert sent["qsgd4, 8192"] < sent["qsgd4, 512"]
    assert sent["1bit*, 512"] < sent["1bit*, 64"]
    assert noise["qsgd4, 512, 2-norm"] > noise["qsgd4, 512"]
    assert sent["qsgd2, 128"] < sent["qsgd2, 128, convolutions"] < 1


def rows_of(script: str, task: str, options: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a quick run of an experiment for one task, by method."""
    path, log = folder / "rows.json", folder / "log"
    arguments = ["--quick", "--only", task, "--json", str(path), *options]
    status = forks.run(PAPER / f"{script}.py", arguments, os.environ, log, folder)
    assert status == 0, log.read_text()
    return {row["method"]: row for row in json.loads(path.read_text())["rows"]}


DRAWS = 400


def coded(codec: Codec, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last message, its decoded values, and the mean of the values of all draws."""
    wire = torch.zeros(codec.nbytes(len(values)), dtype=torch.uint8)
    mean = torch.zeros_like(values)
    for draw in range(DRAWS):
        decoded = torch.zeros_like(values)
        codec.encode(values, wire, Draw(seed=draw))
        codec.decode(wire, decoded)
        mean += decoded / DRAWS
    return wire, decoded, mean


@pytest.mark.parametrize("size", [1, 511, 1024, 1300])
def test_levels_at_powers_of_two_are_rounded_to_without_bias(size: int) -> None:
    codec, levels = codec_parameters.PowersOfTwo(), codec_parameters.LEVELS
    torch.manual_seed(size)
    values = torch.randn(size)
    values[0] = 0.0
    wire, decoded, mean = coded(codec, values)
    scale = values[:512].abs().max()
    magnitudes = decoded[:512].abs() / scale if scale else decoded[:512]
    assert torch.isclose(magnitudes[:, None], levels).any(1).all()
    # The standard deviation of a value is at most half the largest distance of two levels.
    assert (mean - values).abs().max() < 6 * 0.25 * values.abs().max() / DRAWS**0.5 + 1e-6
    codec.decode(wire, decoded, add=True)
    assert decoded[0] == 0.0


@pytest.mark.parametrize("size", [1, 127, 256, 1300])
def test_one_bit_is_unbiased(size: int) -> None:
    codec = codec_parameters.OneBit()
    torch.manual_seed(size)
    values = torch.randn(size)
    wire, decoded, mean = coded(codec, values)
    assert torch.equal(decoded[:128].abs(), values[:128].abs().max().expand(min(size, 128)))
    # The standard deviation of a value is at most the largest magnitude.
    assert (mean - values).abs().max() < 6 * values.abs().max() / DRAWS**0.5 + 1e-6
    sums = decoded.clone()
    codec.decode(wire, sums, add=True)
    assert torch.equal(sums, 2 * decoded)


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 4), (8,)])
def test_codecs_of_convolutions_leave_other_layers_in_fp32(shape: tuple[int, ...]) -> None:
    codec = codec_parameters.QSGD
    kernels, others = (
        codec_parameters.ByLayer(codec, convolutions).fitted(shape)
        for convolutions in (True, False)
    )
    assert (kernels == codec) == (len(shape) == 4)
    assert (others == codec) == (len(shape) != 4)


def test_rows_with_fewer_seeds_do_not_replace_complete_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, task = tmp_path / "rows.json", "LSTM, texts"

    def trained(script: str, job: Any, *settings: Any, **limits: Any) -> dict[str, Any]:
        seeds = {method: run["seed"] for method, run in job["settings"].items()}
        return {method: {"accuracy": 0.1 * seed, "loss": [1.0]} for method, seed in seeds.items()}

    def rows(seeds: int, name: str) -> dict[str, int]:
        options = argparse.Namespace(quick=False, json=path, partial=tmp_path / name, seeds=seeds)
        trainings = codec_trainings.CodecTrainings("script.py", options, ["fp32", "qsgd4"])
        trainings.add(task, ["qsgd4"])
        return {row["method"]: len(row["each"]) for row in json.loads(path.read_text())["rows"]}

    monkeypatch.setattr(codec_trainings, "found_by", trained)
    assert rows(3, "first") == {"fp32": 3, "qsgd4": 3}
    written: list[list[int]] = []

    def write(path: Path, rows: Any, quick: bool) -> None:
        written.append([len(row["each"]) for row in rows])
        write_json(path, rows, quick)

    monkeypatch.setattr(codec_trainings, "write_json", write)
    assert rows(5, "second") == {"fp32": 5, "qsgd4": 5}
    assert written == [[3, 3], [3, 3], [3, 3], [4, 4], [5, 5]]
