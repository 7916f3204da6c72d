"""Table rows from trainings with several seeds, and the set-up of image networks.

Invariant: a cached run is not repeated; a row is written only when all its seeds are complete.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

import benchmarks.support.indicators  # noqa: F401 - registers "hessian"
from benchmarks.paper.support.devices import AnalyzedNetwork, analyze, trained
from benchmarks.paper.support.images import (
    NETWORKS,
    QUICK,
    Images,
    Network,
    Size,
    Trainer,
    built,
    loss,
)
from benchmarks.paper.support.run_cache import RunCache
from benchmarks.support.harness import Row, by_size, selected, write_json
from qsync_fx import Plan
from qsync_fx.progress import progress

METHODS = ("second_order", "paper", "hessian")
"""Sensitivity methods that are measured."""
LOOKED = 8
"""Number of training steps that the sensitivities are averaged over."""
SEEDS = 3

OPTIONS: Mapping[str, dict[str, Any]] = {
    "only": {"help": "networks whose names begin so", "default": None},
    "seeds": {"type": int, "default": SEEDS, "help": "how often each is trained (%(default)s)"},
    "partial": {
        "type": Path,
        "default": Path("runs/paper"),
        "help": "folder for completed trainings, from which a run resumes, shared by the tables "
        "(%(default)s)",
    },
}


class Trains(Protocol):
    """Trainer for one plan, compiled once for all seeds."""

    def accuracy(self, seed: int, advance: Callable[[], None]) -> float:
        """Train from new weights and return the test accuracy; call `advance` after each epoch."""


class Experiment:
    """Rows of a table, each from runs with several seeds.

    Args:
        options: command-line options.
        name: file name of the run cache, without extension.
        epochs: epochs per run.
        metadata: further top-level keys of the result file.
    """

    def __init__(
        self, options: argparse.Namespace, name: str, epochs: int, **metadata: Any
    ) -> None:
        torch.set_num_threads(1)
        self.quick, self.seeds = options.quick, by_size(options.quick, 1, options.seeds)
        self.rows: list[Row] = []
        self._options, self._epochs, self._metadata = options, epochs, metadata
        self._cache = RunCache(
            options.partial / f"{by_size(options.quick, 'quick-', '')}{name}.json"
        )

    def add(self, row: Row) -> None:
        """Add a row and write all rows to the result file."""
        self.rows.append(row)
        if self._options.json:
            write_json(self._options.json, self.rows, self.quick, **self._metadata)

    def accuracy(
        self, title: str, settings: Mapping[str, Any], begin: Callable[[], Trains]
    ) -> dict[str, Any]:
        """Return the accuracy over all seeds; `begin` creates the trainer for uncached runs."""
        trains: list[Trains] = []

        def run(seed: int, advance: Callable[[str], None]) -> float:
            if not trains:
                trains.append(begin())
            return trains[0].accuracy(seed, lambda: advance(f"{title}, seed {seed}"))

        accuracies = []
        with progress("training", self.seeds * self._epochs) as advance:
            for seed in range(self.seeds):
                key = {**settings, "seed": seed}
                accuracies.append(self._cache.get(key, lambda seed=seed: run(seed, advance)))  # type: ignore[misc]
        print(f"{title}: {', '.join(f'{value:.2%}' for value in accuracies)}", flush=True)
        return {
            "accuracy": statistics.fmean(accuracies),
            "deviation": deviation(accuracies),
            "each": accuracies,
        }


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample, or 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def points_above(each: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Return the mean accuracy minus FP32's at equal seeds, and its standard error.

    Both are percentage points.
    """
    points = [100 * (value - other) for value, other in zip(each, baseline, strict=True)]
    error = deviation(points) / math.sqrt(len(points))
    return {"points": statistics.fmean(points), "error": error}


class OnImages(Experiment):
    """Image networks that two ranks train under plans.

    Args:
        options: command-line options.
        networks: to select from.
    """

    def __init__(
        self, options: argparse.Namespace, networks: Mapping[str, Network] = NETWORKS
    ) -> None:
        self._networks = networks
        self._source = by_size(options.quick, "digits", None)
        data = Images(Size(), self._source).name
        super().__init__(
            options, "trained", by_size(options.quick, QUICK, Size()).epochs, images=data
        )

    def networks(self) -> Iterator[tuple[str, AnalyzedNetwork]]:
        """Yield the selected networks with graphs and sensitivities; only the last with --quick."""
        for name in list(selected(self._options, self._networks))[by_size(self.quick, -1, 0) :]:
            yield name, self.look(name)

    def images(self, name: str) -> Images:
        """Return the images of a network's training."""
        return Images(by_size(self.quick, QUICK, self._networks[name].size), self._source)

    def look(self, name: str) -> AnalyzedNetwork:
        """Return the planned network's graphs and the trained network's sensitivities."""
        images, network = self.images(name), self._networks[name]
        model, planned = (
            built(build, images.classes, 0)
            for build in (network.build, network.planned or network.build)
        )
        data = images.subset(0)
        steps = by_size(self.quick, 1, LOOKED)
        parts = images.parts(data, [images.size.batch], 0, 0)
        batches = [part[0] for part, _ in zip(parts, range(steps), strict=False)]
        return analyze(model, planned, loss, batches, [batches[0][0][:2]], METHODS)

    def row(
        self, name: str, label: str, plan: Mapping[str, str], batches: Sequence[int]
    ) -> dict[str, Any]:
        """Return the accuracy over all seeds of a T4 plan, trained with a V100 in FP32."""
        low, images = trained(plan), self.images(name)
        settings = {
            "network": name,
            "images": images.name,
            "size": asdict(images.size),
            "batches": list(batches),
            "plan": low.to_json(),
        }
        plans = (Plan.uniform("fp32"), low)
        return self.accuracy(
            f"{name}, {label}",
            settings,
            lambda: Trainer(self._networks[name], images, plans, batches),
        )
