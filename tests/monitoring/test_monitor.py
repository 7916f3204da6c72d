"""`qsync_fx.monitor`: correct metrics of a training, without any effect on it."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsync_fx
from qsync_fx import OptionError, Plan
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.monitoring import step_monitor
from tests.support.compiling.switched import NOT_FOLLOWED
from tests.support.distributed.monitored_rank import LATE, STEPS
from tests.support.models.small_models import Perceptron, build, compiled
from tests.support.processes import ranks

pytestmark = NOT_FOLLOWED
torch.set_num_threads(1)

PLAN = Plan("int8", [("head", "bf16")], notes={"seconds": "0.25"})
Rows = dict[int, dict[str, float]]


def train(model: Any, steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def recorder(rows: Rows) -> Any:
    def record(step: int, metrics: Mapping[str, float]) -> None:
        rows[step] = dict(metrics)

    return record


@pytest.mark.parametrize(("share", "expected"), [(1e9, [2, 4, 6]), (1e-9, [2])])
def test_statistics_wait_until_their_share_of_the_time_is_small(
    share: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_monitor, "EVERY", 2)
    monkeypatch.setattr(step_monitor, "SHARE", share)
    model, rows = compiled(build(Perceptron), plan=PLAN), Rows()
    with qsync_fx.monitor(model, recorder(rows)):
        train(model, 6)
    assert [step for step, row in rows.items() if "scale/layers.0/linear" in row] == expected


def test_each_step_has_its_seconds_and_the_prediction_of_the_active_plan() -> None:
    model, rows = compiled(build(Perceptron), plan=PLAN), Rows()
    with qsync_fx.monitor(model, recorder(rows), every=0, first_step=10):
        train(model, 2)
        qsync_fx.switch_plan(model, Plan("bf16", notes={"seconds": "0.5"}))
        train(model, 1)
    train(model, 1)
    assert list(rows) == [11, 12, 13]
    assert [row["predicted_s"] for row in rows.values()] == [0.25, 0.25, 0.5]
    assert "step_s" not in rows[11]
    assert rows[12]["step_s"] > 0
    assert rows[12]["monitor_s"] > 0
    assert not any("/" in name for row in rows.values() for name in row)


def test_statistics_are_those_of_the_quantizer() -> None:
    network = build(Perceptron)
    with torch.no_grad():
        network.layers[0].weight[0, 0] = 40  # an outlier: most other weights round to zero
        network.head.weight[0, 0] = 1e-45  # below the range of BF16
    model, rows, copies = compiled(network, plan=PLAN), Rows(), list[Tensor]()

    def record(step: int, metrics: Mapping[str, float]) -> None:
        rows[step] = dict(metrics)
        copies.append(network.layers[0].weight.detach().clone())

    with qsync_fx.monitor(model, record, every=2):
        train(model, 2)
    assert not any("/" in name for name in rows[1])
    row, weight = rows[2], copies[1]
    q, scale = quantize(weight, torch.zeros(1, dtype=torch.int64), 0, "int8", "nearest", [])
    error = (q * scale - weight).square().sum() / weight.square().sum()
    operator = "layers.0/linear"
    assert row[f"scale/{operator}"] == float(scale)
    assert row[f"saturation/{operator}"] == 1 / weight.numel()
    assert row[f"underflow/{operator}"] == float((q == 0).float().mean()) > 0.5
    assert row[f"rounding_error/{operator}"] == pytest.approx(float(error), rel=1e-4)
    gradient = network.layers[0].weight.grad
    assert gradient is not None
    assert row[f"gradient_norm/{operator}"] == pytest.approx(float(gradient.norm()), rel=1e-6)
    assert "scale/head/linear" not in row
    assert row["saturation/head/linear"] == 0
    assert 0 < row["rounding_error/head/linear"] < 1e-4


def test_a_scale_per_channel_reports_the_largest() -> None:
    network, rows = build(Perceptron), Rows()
    model = compiled(network, precision="int8", scaling="channel")
    with qsync_fx.monitor(model, recorder(rows), every=1):
        train(model, 1)
    weight = network.head.weight.detach()
    assert rows[1]["scale/head/linear"] == pytest.approx(float(weight.abs().max()) / 127)
    assert rows[1]["saturation/head/linear"] >= len(weight) / weight.numel()


def test_training_is_the_same_to_the_last_bit() -> None:
    plain = train(compiled(build(Perceptron), plan=PLAN), 4)
    torch._dynamo.reset()
    model = compiled(build(Perceptron), plan=PLAN)
    with qsync_fx.monitor(model, recorder(Rows()), every=1):
        monitored = train(model, 4)
    assert torch.equal(torch.stack(plain), torch.stack(monitored))


def test_optimizers_of_other_models_are_not_steps() -> None:
    rows = Rows()
    with qsync_fx.monitor(build(Perceptron), recorder(rows)):
        train(build(Perceptron), 2)
    assert rows == {}


def test_csv_has_one_metric_per_row(tmp_path: Path) -> None:
    model, rows, path = build(Perceptron), Rows(), tmp_path / "logs" / "run.csv"
    with qsync_fx.monitor(model, [path, recorder(rows)], every=1):
        train(model, 3)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    expected = [(n, name, value) for n, row in rows.items() for name, value in row.items()]
    assert [(int(x["step"]), x["metric"], float(x["value"])) for x in lines] == expected


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.chdir(tmp_path)
    model, rows = compiled(build(Perceptron), plan=PLAN), Rows()
    with SummaryWriter("given") as writer:
        to = ["tensorboard", writer, recorder(rows)]
        with qsync_fx.monitor(model, to, every=2):
            train(model, 2)
    (created,) = (tmp_path / "runs").iterdir()
    for folder in (tmp_path / "given", created):
        events = EventAccumulator(str(folder)).Reload()
        assert set(events.Tags()["scalars"]) == set(rows[1]) | set(rows[2])
        (event,) = events.Scalars("scale/layers.0/linear")
        assert event.step == 2
        assert event.value == pytest.approx(rows[2]["scale/layers.0/linear"])


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    run = wandb.init()
    with qsync_fx.monitor(model := build(Perceptron), "wandb"):
        train(model, 2)
    assert run.summary["step"] == 2
    assert run.summary["step_s"] > 0
    run.finish()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"to": "run.txt"}, "'run.txt' is no destination of metrics"),
        ({"to": 3}, "3 is no destination of metrics"),
        ({"to": print, "every": -1}, "every must be a number of steps, not -1"),
        ({"to": print, "compression": print}, "compression must be a handle"),
        ({"to": print, "model": print}, "monitor requires a torch.nn.Module"),
        ({"to": "/proc/none/run.csv"}, "metrics cannot be written"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        qsync_fx.monitor(**{"model": nn.Linear(2, 2), **arguments})


def test_ranks_report_what_they_send_and_how_long_they_wait(tmp_path: Path) -> None:
    early, late = ranks.results("train", 2, tmp_path / "ranks", script="monitored_rank.py")
    for rank, result in enumerate((early, late)):
        assert (tmp_path / "ranks" / f"run.rank{rank}.csv").exists()
        assert len(result["rows"]) == STEPS
        assert sum(row["sent_bytes"] for row in result["rows"]) == result["wire"] > 0
        assert sum(row["codec_s"] for row in result["rows"]) > 0
    # In the second step DistributedDataParallel waits in the forward pass, as it rebuilds buckets.
    waits = [min(row["waiting_s"] for row in result["rows"][2:]) for result in (early, late)]
    assert waits[0] > LATE / 2
    assert waits[1] < waits[0]
