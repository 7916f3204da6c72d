"""Data-parallel trainings over loopback with gradient codecs, and their table rows.

A row is the mean over all seeds: final "accuracy" and its standard "deviation", "points" is the
difference to FP32 in percentage points and "error" its standard error, "each" lists the seeds'
accuracies, "loss" gives rank 0's mean loss in twentieths of the training, and "loss above" the mean
of the last tenth minus FP32's, with its standard error "loss error"; None if a training diverged.
"sent" is the number of bytes
relative to FP32, and "noise" the squared coding error relative to the squared gradient, from every
hundredth step.

Invariant: all methods of a seed start from the same weights and read the same batches. A completed
training is cached, and FP32 is always among the methods.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.communication.ranks import found_by, requested_job
from benchmarks.paper.support.experiment import OPTIONS, deviation, points_above
from benchmarks.paper.support.run_cache import RunCache
from benchmarks.paper.support.studied import SIZES, TASKS, Training
from benchmarks.support.harness import (
    arguments,
    by_size,
    selected,
    show,
    standing,
    write_json,
)

WHOLE = "fp32"
PARTS = 20
"""Number of segments of a training whose mean losses are reported."""
DAY = 24 * 3600.0
"""Time limit in seconds of the trainings of a seed."""

Install = Callable[[DistributedDataParallel, str, Training, Optimizer, int], Any]
"""Function that installs a method by name, with a seed, and returns its compressor or None."""


class CodecTrainings:
    """Table of trainings: rows by task and method, written after each seed.

    Args:
        script: the file that a rank runs: it calls `run_rank`.
        options: command-line options, with `experiment.OPTIONS`.
        methods: all methods in the order of rows, FP32 first.
        ranks: number of processes of a training.
    """

    def __init__(
        self, script: str, options: argparse.Namespace, methods: Sequence[str], ranks: int = 2
    ) -> None:
        self._script, self._options, self._methods = script, options, methods
        self._ranks = ranks
        cache = options.partial / f"{Path(script).stem}.json"
        self._cache = RunCache(by_size(options.quick, None, cache))
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}
        if options.json:
            before = standing(options.json, options.quick, all_machines=True)
            self._rows = {(row["task"], row["method"]): row for row in reversed(before)}

    def add(self, task: str, methods: Sequence[str]) -> None:
        """Train with these methods and FP32, and write the rows after each seed.

        Rows of the file are replaced once as many seeds are complete as the task's rows have, or as
        requested.
        """
        options = self._options
        chosen = [method for method in self._methods if method == WHOLE or method in methods]
        seeds = by_size(options.quick, 1, options.seeds)
        earlier = [len(row["each"]) for row in self._rows.values() if row["task"] == task]
        least = min(seeds, max(earlier, default=1))
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in chosen}
        for seed in range(seeds):
            results = self._train(task, seed, chosen)
            for method, done in runs.items():
                done.append(results[method])
            for method, done in runs.items():
                if len(done) >= least:
                    self._rows[task, method] = self._row(task, method, done, runs[WHOLE])
            if options.json:
                write_json(options.json, self._ordered(), options.quick)

    def show(self) -> None:
        """Print the rows without their lists."""
        lists = ("loss", "each")
        show([{k: v for k, v in row.items() if k not in lists} for row in self._ordered()])

    def _train(self, task: str, seed: int, methods: Iterable[str]) -> dict[str, Any]:
        """Return the result of each method; train with those that are not in the cache."""
        quick, path = self._options.quick, self._cache.path
        common = {"task": task, "size": SIZES[task], "seed": seed, "quick": quick}
        settings = {method: {**common, "method": method} for method in methods}
        missing = {name: run for name, run in settings.items() if run not in self._cache}
        results: dict[str, Any] = {}
        if missing:
            job = {"settings": missing, "cache": None if path is None else str(path)}
            results = found_by(self._script, job, self._ranks, None, seconds=DAY)
        return {
            method: self._cache.get(run, lambda method=method: results[method])  # type: ignore[misc]
            for method, run in settings.items()
        }

    def _row(
        self,
        task: str,
        method: str,
        runs: Sequence[dict[str, Any]],
        full: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        each = [run["accuracy"] for run in runs]
        losses = [_final(run) - _final(other) for run, other in zip(runs, full, strict=True)]
        means = {
            name: statistics.fmean(run[name] for run in runs)
            for name in ("sent", "noise")
            if all(math.isfinite(run.get(name, math.nan)) for run in runs)
        }
        converged = all(map(math.isfinite, losses))
        segments = [
            statistics.fmean(part) for part in zip(*(run["loss"] for run in runs), strict=True)
        ]
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "size": by_size(self._options.quick, "a few steps", SIZES[task]),
            "task": task,
            "method": method,
            "accuracy": statistics.fmean(each),
            "deviation": deviation(each),
            **points_above(each, [run["accuracy"] for run in full]),
            "each": each,
            "loss above": statistics.fmean(losses) if converged else None,
            "loss error": deviation(losses) / math.sqrt(len(losses)) if converged else None,
            **means,
            "loss": [value if math.isfinite(value) else None for value in segments],
        }

    def _ordered(self) -> list[dict[str, Any]]:
        """Return the rows in the order of tasks and methods, without those that no longer exist."""
        places = list(itertools.product(TASKS, self._methods))
        return [self._rows[place] for place in places if place in self._rows]


def main(
    script: str,
    description: str | None,
    methods: Mapping[str, Sequence[str]],
    install: Install,
    ranks: int = 2,
) -> None:
    """Run a script of these trainings, or one of its ranks.

    Args:
        script: the file, which calls this function with the same arguments on a rank.
        description: its docstring.
        methods: methods of each task, to compare with FP32.
        install: see `Install`.
        ranks: number of processes of a training.
    """
    if (job := requested_job()) is not None:
        run_rank(job, install)
        return
    every = dict.fromkeys(itertools.chain([WHOLE], *methods.values()))
    choice = {
        "action": "append",
        "choices": [*every][1:],
        "metavar": "NAME",
        "help": "method to compare with FP32; repeatable; by default all",
    }
    options = arguments(description, None, **OPTIONS, method=choice)
    torch.set_num_threads(1)
    trainings = CodecTrainings(script, options, [*every], ranks)
    for task in selected(options, methods):
        chosen = [name for name in methods[task] if name in (options.method or every)]
        if chosen:
            trainings.add(task, chosen)
    trainings.show()


def _final(run: Mapping[str, Any]) -> float:
    """Return the mean loss of the last tenth of a training, or of all of a short one."""
    losses = run["loss"]
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])


def run_rank(job: Mapping[str, Any], install: Install) -> None:
    """Run one rank: one training per method; rank 0 caches each result."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    cache = RunCache(None if job["cache"] is None else Path(job["cache"]))
    results: dict[str, Any] = {}
    for method, run in job["settings"].items():
        training = TASKS[run["task"]](ranks, run["seed"], run["quick"])
        results[method] = trained(training, method, run["seed"], install)
        if distributed.get_rank() == 0:
            cache.get(run, lambda method=method: results[method])  # type: ignore[misc]
            text = f"{run['task']}, seed {run['seed']}, {method}"
            print(f"{text}: {results[method]['accuracy']:.2%}", flush=True)
    if distributed.get_rank() == 0:
        Path(job["path"]).write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


def trained(training: Training, method: str, seed: int, install: Install) -> dict[str, Any]:
    """Return the accuracy and losses of a training, and the bytes and noise of its compressor."""
    ddp, rank_index = DistributedDataParallel(training.model), distributed.get_rank()
    optimizer = training.optimizer(ddp.parameters(), training.rate)
    handle = install(ddp, method, training, optimizer, seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        training.rate,
        total_steps=training.steps + 1,
        cycle_momentum=training.cycles_momentum,
    )
    losses = []
    for parts in training.batches():
        optimizer.zero_grad()
        loss = training.loss(ddp, parts[rank_index])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    result: dict[str, Any] = {}
    if handle is not None:
        if method.startswith("duo"):
            handle.flush()
        report = handle.report()
        result["sent"] = report.ratio
        if report.variance is not None:
            result["noise"] = report.variance
    pieces = min(PARTS, len(losses))
    edges = [len(losses) * index // pieces for index in range(pieces + 1)]
    means = [statistics.fmean(losses[begin:end]) for begin, end in itertools.pairwise(edges)]
    return {"accuracy": training.accuracy(training.model.eval()), "loss": means, **result}
