"""Share of `qsync_fx.monitor` in a training step at its default interval.
Forward, backward and fused SGD in INT8, without a monitor and with one that writes a CSV file.
"step ms" and "statistics ms" are medians of the monitor's own time in a step without and with
statistics of weights, plus the time per step to write the file. "every" is the default number of
steps between statistics for this step, "share" the mean over that number relative to a step
without a monitor.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qsync_fx
from qsync_fx.monitoring.metric_sinks import CsvSink
from qsync_fx.monitoring.step_monitor import EVERY, SHARE

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import Row, arguments, by_size, finish, measure

STEPS = 4
"""Steps of one sample; the monitor's seconds of a step are reported by the next one."""
Case = tuple[nn.Module, torch.Tensor]


def linear_layers(width: int, depth: int) -> Case:
    """Return a chain of linear layers and its batch of 64 rows."""
    layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(64, width)


def bert(layers: int, batch: int, length: int) -> Case:
    """Return layers of BERT-base and a batch of token ids."""
    from transformers import BertConfig, BertModel

    config: Any = BertConfig(num_hidden_layers=layers)
    model: Any = BertModel(config)
    return model, torch.randint(30000, (batch, length))


def training_step(model: nn.Module, x: torch.Tensor) -> tuple[nn.Module, Callable[[], None]]:
    """Return the compiled model and a function that trains one step."""
    compiled: Any = torch.compile(model.train(), backend="qsync", options={"precision": "int8"})
    optimizer = qsync_fx.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        output = compiled(x)
        loss = getattr(output, "last_hidden_state", output).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return compiled, step


def row_of(name: str, case: Case, repeats: int, folder: str) -> Row:
    """Return the measurements of a model."""
    compiled, step = training_step(*case)

    def without() -> None:
        for _ in range(STEPS):
            step()

    def monitored(every: int, costs: list[float]) -> Callable[[], None]:
        sink = CsvSink(Path(folder) / f"{every}.csv")

        def record(number: int, metrics: dict[str, float]) -> None:
            sink(number, metrics)
            if "monitor_s" in metrics:
                costs.append(metrics["monitor_s"])

        def run() -> None:
            with qsync_fx.monitor(compiled, record, every=every):
                without()

        return run

    alone, with_statistics = list[float](), list[float]()
    times = measure({"without": without}, repeats)
    measure({"step": monitored(0, alone)}, repeats)
    measure({"statistics": monitored(1, with_statistics)}, repeats)
    seconds = times.median("without") / STEPS
    written = seconds_of_writing(Path(folder) / "written.csv")
    cost = statistics.median(alone) + written
    most = statistics.median(with_statistics) + written
    every = EVERY * max(1, math.ceil(most / SHARE / seconds / EVERY))
    return {
        "case": name,
        "milliseconds": seconds * 1e3,
        "step ms": cost * 1e3,
        "statistics ms": most * 1e3,
        "every": every,
        "share": (cost * (every - 1) + most) / every / seconds,
    }


def seconds_of_writing(path: Path) -> float:
    """Return the seconds per step in which a file of 1000 steps is written, once a second."""
    sink, metrics = CsvSink(path), {"step_s": 0.0123456789, "monitor_s": 6.5123456789e-6}
    for step in range(1000):
        sink(step, metrics)
    begin = time.perf_counter()
    sink.close()
    return (time.perf_counter() - begin) / 1000


def main() -> None:
    options = arguments(__doc__)
    sizes = by_size(options.quick, (1, 1, 16), (2, 8, 128))
    repeats = by_size(options.quick, 2, 7)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row_of("3 linear layers of 256", linear_layers(256, 3), repeats, folder),
            row_of("8 linear layers of 1024", linear_layers(1024, 8), repeats, folder),
            row_of("BERT {} layers, {} x {} tokens".format(*sizes), bert(*sizes), repeats, folder),
        ]
    finish(options, rows)


if __name__ == "__main__":
    main()
