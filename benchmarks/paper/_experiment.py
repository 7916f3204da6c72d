"""What the experiments that train share: how a network is looked at, and a row of a table from runs with several seeds.

Invariant: a run that has been kept is not run again; a row is of all seeds, or is not written.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _devices import Looked, looked, trained
from _harness import Row, selected, write_json
from _images import NETWORKS, QUICK, Images, Size, Trainer, built, loss
from _kept import Kept

from qsync_fx import Plan
from qsync_fx.profiling.progress import progress

METHODS = ("exact", "paper", "hessian")
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


class Experiment:
    """Networks on images, trained under plans of a pair of ranks.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.quick, self.seeds = options.quick, 1 if options.quick else options.seeds
        self.images = Images(QUICK if options.quick else Size(), "digits" if options.quick else None)
        self.kept = Kept(options.partial / ("quick.json" if options.quick else "trained.json"))
        self.rows: list[Row] = []
        self._options = options

    def networks(self) -> Iterator[tuple[str, Looked]]:
        """Yields the networks that were asked for, and what is known of each."""
        for name in selected(self._options, NETWORKS):
            yield name, self.look(name)

    def add(self, row: Row) -> None:
        """Adds a row to the table, which is written with all that there are."""
        self.rows.append(row)
        if self._options.json:
            write_json(self._options.json, self.rows, self.quick, images=self.images.name)

    def look(self, name: str) -> Looked:
        """Returns what a network's operators take and disturb."""
        images, network = self.images, NETWORKS[name]
        model, data = built(network, images.classes, 0), images.subset(0)
        steps = 1 if self.quick else LOOKED
        parts = images.parts(data, [images.size.batch], 0, 0)
        batches = [part[0] for part, _ in zip(parts, range(steps), strict=False)]
        return looked(model, loss, batches, {"x": batches[0][0][:2]}, METHODS)

    def row(self, name: str, what: str, plan: Mapping[str, str], batches: Sequence[int]) -> dict[str, Any]:
        """Returns the accuracy of a plan of the T4 beside a V100 in FP32, over all seeds."""
        plans = (Plan.uniform("fp32"), trained(plan))
        trainers: list[Trainer] = []

        def run(seed: int, advance: Callable[[str], None]) -> float:
            if not trainers:
                trainers.append(Trainer(NETWORKS[name], self.images, plans, batches))
            return trainers[0].accuracy(seed, lambda: advance(f"{name}, {what}, seed {seed}"))

        found = []
        with progress("training", self.seeds * self.images.size.epochs) as advance:
            for seed in range(self.seeds):
                settings = {
                    "network": name,
                    "images": self.images.name,
                    "size": asdict(self.images.size),
                    "batches": list(batches),
                    "plan": trained(plan).to_json(),
                    "seed": seed,
                }
                found.append(self.kept.get(settings, lambda seed=seed: run(seed, advance)))  # type: ignore[misc]
        print(f"{name}, {what}: {', '.join(f'{one:.2%}' for one in found)}", flush=True)
        deviation = statistics.stdev(found) if len(found) > 1 else 0.0
        return {"accuracy": statistics.fmean(found), "deviation": deviation, "each": found}
