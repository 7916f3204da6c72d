"""Sinks of metrics: CSV, TensorBoard, Weights & Biases, and callables.

A sink is a callable that receives a step number and a flat mapping of floats. If it has a method
`close`, the monitor calls it at the end of training.
"""

from __future__ import annotations

import csv
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from qsync_fx.errors import OptionError
from qsync_fx.plan.cluster_plan import this_process

_EXPECTED: Final = (
    'use a path that ends with ".csv", "tensorboard", "wandb", a SummaryWriter, a run of wandb, or '
    "a callable that receives a step and a mapping of floats"
)


class MetricSink(Protocol):
    """Receiver of metrics."""

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> object: ...


Destination: TypeAlias = "MetricSink | str | os.PathLike[str] | Any"
"""Value of the argument `to` of `monitor`, or an element of it."""


class CsvSink:
    """CSV file with one metric per row: step, metric, value."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"metrics cannot be written: {error.strerror or error}",
                where=str(path),
                do="use another path",
            ) from error
        self._written = time.monotonic()
        self._steps: list[tuple[int, Mapping[str, float]]] = []
        self._writer = csv.writer(self._file)
        self._writer.writerow(("step", "metric", "value"))

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps.append((step, metrics))
        # A run that is killed loses the rows of a second.
        if time.monotonic() > self._written + 1:
            self._write()

    def _write(self) -> None:
        self._writer.writerows(
            (step, name, repr(value))
            for step, metrics in self._steps
            for name, value in metrics.items()
        )
        self._file.flush()
        self._steps.clear()
        self._written = time.monotonic()

    def close(self) -> None:
        if not self._file.closed:
            self._write()
            self._file.close()


class TensorBoardSink:
    """SummaryWriter of torch.utils.tensorboard; `owned` if the monitor closes it."""

    def __init__(self, writer: Any, owned: bool = False) -> None:
        self._writer, self._owned = writer, owned

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._owned:
            self._writer.close()
        else:
            self._writer.flush()


class WandbSink:
    """Run of Weights & Biases; its step axis is the metric "step"."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        # Without `step=`: wandb drops rows with a step below the last row, which the loop may log.
        self._run.log({"step": step, **metrics})


def sinks(to: Destination | Sequence[Destination]) -> list[MetricSink]:
    """Return the sinks of a destination, or of several.

    Raises:
        OptionError: a destination is none, its package is not installed, or a file cannot be made.
    """
    destinations = to if isinstance(to, list | tuple) else [to]
    return [_sink(destination) for destination in destinations]


def _sink(destination: Any) -> MetricSink:
    if isinstance(destination, str | os.PathLike):
        text = os.fspath(destination)
        if text.endswith(".csv"):
            return CsvSink(_of_this_rank(Path(text)))
        if text == "tensorboard":
            writer = _installed("torch.utils.tensorboard", "tensorboard").SummaryWriter()
            return TensorBoardSink(writer, owned=True)
        if text == "wandb":
            wandb = _installed("wandb", "wandb")
            return WandbSink(wandb.run if wandb.run is not None else wandb.init())
    elif hasattr(destination, "add_scalar"):
        return TensorBoardSink(destination)
    elif hasattr(destination, "log") and not callable(destination):
        return WandbSink(destination)
    elif callable(destination):
        sink: MetricSink = destination
        return sink
    raise OptionError(
        f"{destination!r} is no destination of metrics",
        where="qsync_fx.monitor(..., to=...)",
        do=_EXPECTED,
    )


def _of_this_rank(path: Path) -> Path:
    """Return the file of this process: with several ranks, "run.csv" becomes "run.rank1.csv"."""
    process = this_process()
    if (process.world or 1) == 1:
        return path
    return path.with_name(f"{path.stem}.rank{process.rank}{path.suffix}")


def _installed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OptionError(
            f"the package {package} is not installed: {error}",
            where="qsync_fx.monitor(..., to=...)",
            do=f'run "pip install {package}", or use a path that ends with ".csv"',
        ) from error
