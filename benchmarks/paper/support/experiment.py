"""What the experiments that train share: a row of a table from runs with several seeds, and how a network on images is looked at.

Invariant: a run that has been kept is not run again; a row is of all seeds, or is not written.
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

from benchmarks.paper.support.devices import Looked, looked, trained
from benchmarks.paper.support.images import (
    NETWORKS,
    QUICK,
    WIDE,
    Images,
    Size,
    Trainer,
    built,
    loss,
)
from benchmarks.paper.support.kept import Kept
from benchmarks.support.harness import Row, selected, write_json
from qsync_fx import Plan
from qsync_fx.profiler.progress import progress

METHODS = ("second_order", "paper", "hessian")
"""Sensitivities that are measured."""
LOOKED = 8
"""Steps that they are the mean over, of a training that begins."""
SEEDS = 3

OPTIONS: Mapping[str, dict[str, Any]] = {
    "only": {"help": "networks whose names begin so", "default": None},
    "seeds": {"type": int, "default": SEEDS, "help": "how often each is trained (%(default)s)"},
    "partial": {
        "type": Path,
        "default": Path("runs/paper"),
        "help": "folder that keeps what was trained, to go on from and to share with the other tables (%(default)s)",
    },
}


class Trains(Protocol):
    """What trains under one plan; compiled once, for all seeds."""

    def accuracy(self, seed: int, advance: Callable[[], None]) -> float:
        """Trains anew, says when an epoch is through, and returns the share of what it is tested with that is right."""


class Experiment:
    """Rows of a table, each of runs with several seeds.

    Args:
        options: of the command line.
        kept: the name of the file that keeps runs.
        epochs: of a run.
        said: what else the results say of themselves.
    """

    def __init__(self, options: argparse.Namespace, kept: str, epochs: int, **said: Any) -> None:
        torch.set_num_threads(1)
        self.quick, self.seeds = options.quick, 1 if options.quick else options.seeds
        self.rows: list[Row] = []
        self._options, self._epochs, self._said = options, epochs, said
        self._kept = Kept(options.partial / f"{'quick-' if options.quick else ''}{kept}.json")

    def add(self, row: Row) -> None:
        """Adds a row to the table, which is written with all that there are."""
        self.rows.append(row)
        if self._options.json:
            write_json(self._options.json, self.rows, self.quick, **self._said)

    def accuracy(
        self, title: str, settings: Mapping[str, Any], begin: Callable[[], Trains]
    ) -> dict[str, Any]:
        """Returns the accuracy over all seeds; `begin` makes what trains, where a run is not kept yet."""
        trains: list[Trains] = []

        def run(seed: int, advance: Callable[[str], None]) -> float:
            if not trains:
                trains.append(begin())
            return trains[0].accuracy(seed, lambda: advance(f"{title}, seed {seed}"))

        found = []
        with progress("training", self.seeds * self._epochs) as advance:
            for seed in range(self.seeds):
                found.append(
                    self._kept.get({**settings, "seed": seed}, lambda seed=seed: run(seed, advance))  # type: ignore[misc]
                )
        print(f"{title}: {', '.join(f'{one:.2%}' for one in found)}", flush=True)
        deviation = statistics.stdev(found) if len(found) > 1 else 0.0
        return {"accuracy": statistics.fmean(found), "deviation": deviation, "each": found}


def beside(each: Sequence[float], whole: Sequence[float]) -> dict[str, float]:
    """Returns what accuracies are more than those of the same seeds in FP32, in points of a hundred: the mean, and its standard error."""
    points = [100 * (one - other) for one, other in zip(each, whole, strict=True)]
    error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 0.0
    return {"points": statistics.fmean(points), "error": error}


class OnImages(Experiment):
    """Networks on images, trained under plans of a pair of ranks.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.images = Images(
            QUICK if options.quick else Size(), "digits" if options.quick else None
        )
        super().__init__(options, "trained", self.images.size.epochs, images=self.images.name)

    def networks(self) -> Iterator[tuple[str, Looked]]:
        """Yields the networks that were asked for, the last alone where nothing is measured, and what is known of each."""
        for name in list(selected(self._options, NETWORKS))[-1 if self.quick else 0 :]:
            yield name, self.look(name)

    def look(self, name: str) -> Looked:
        """Returns what the operators of a network take where it is wide, and disturb where it is trained."""
        images = self.images
        model, wide = (
            built(build, images.classes, 0) for build in (NETWORKS[name].build, WIDE[name])
        )
        data = images.subset(0)
        steps = 1 if self.quick else LOOKED
        parts = images.parts(data, [images.size.batch], 0, 0)
        batches = [part[0] for part, _ in zip(parts, range(steps), strict=False)]
        return looked(model, wide, loss, batches, [batches[0][0][:2]], METHODS)

    def row(
        self, name: str, what: str, plan: Mapping[str, str], batches: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the accuracy of a plan of the T4 beside a V100 in FP32, over all seeds."""
        low = trained(plan)
        settings = {
            "network": name,
            "images": self.images.name,
            "size": asdict(self.images.size),
            "batches": list(batches),
            "plan": low.to_json(),
        }
        plans = (Plan.uniform("fp32"), low)
        return self.accuracy(
            f"{name}, {what}",
            settings,
            lambda: Trainer(NETWORKS[name], self.images, plans, batches),
        )
