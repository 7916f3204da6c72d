"""Accuracy and loss curves of data-parallel training with compressed gradients.
Two processes train a ResNet on images, an LSTM text classifier and a GPT over loopback, with each
codec and with torch's PowerSGD hook as the peer. All codecs start from the same weights and read
the same batches. A row is the mean over all seeds: final "accuracy" and its standard "deviation",
"points" is the difference to FP32 in percentage points and "error" its standard error, "each" lists
the seeds' accuracies, and "loss" gives rank 0's mean loss in twentieths of the training. Rows of
tasks that --only excludes, and of codecs that --way excludes, stay in the file; FP32 always runs.
"""

from __future__ import annotations

import datetime
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.distributed import compress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication.ranks import found_by, told
from benchmarks.paper.support.experiment import OPTIONS, beside, deviation
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

RANKS = 2
WHOLE = "fp32"
PEER = "powerSGD_hook"
WAYS = (WHOLE, "1bit", "1bit*", "qsgd2", "qsgd4", "qsgd8", "duo0", "duo1", "duo2", "duo4", PEER)
PARTS = 20
"""Number of segments of a training whose mean losses are reported."""
PEER_RANK = 2
"""Rank of PowerSGD's matrices.

torch's documentation recommends starting with 1 and doubling until the accuracy suffices.
"""
PEER_BEGINS = 0.1
"""Fraction of the training in FP32 before PowerSGD starts, as its documentation recommends."""


def main() -> None:
    if (job := told()) is not None:
        rank(job)
        return
    options = arguments(
        __doc__,
        None,
        **OPTIONS,
        way={
            "action": "append",
            "choices": WAYS[1:],
            "metavar": "NAME",
            "help": "method to compare with FP32; repeatable; by default all",
        },
    )
    torch.set_num_threads(1)
    partial = RunCache(by_size(options.quick, None, options.partial / "codec_accuracy.json"))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    tasks = selected(options, TASKS)
    before = standing(options.json, options.quick) if options.json else []
    methods = [method for method in WAYS if method == WHOLE or method in (options.way or WAYS)]
    rows = [
        entry
        for entry in before
        if entry["task"] in TASKS and (entry["task"] not in tasks or entry["way"] not in methods)
    ]
    for task in tasks:
        every = []
        for seed in range(by_size(options.quick, 1, options.seeds)):
            job = {
                "task": task,
                "size": SIZES[task],
                "seed": seed,
                "ways": methods,
                "quick": options.quick,
            }
            every.append(partial.get(job, lambda job=job: trained(job)))  # type: ignore[misc]
        metadata = {"date": today, "size": by_size(options.quick, "a few steps", SIZES[task])}
        rows += [
            metadata
            | row(
                task, method, [entry[method] for entry in every], [entry[WHOLE] for entry in every]
            )
            for method in methods
        ]
        rows.sort(key=lambda entry: (list(TASKS).index(entry["task"]), WAYS.index(entry["way"])))
        if options.json:
            write_json(options.json, rows, options.quick)
    show(
        [
            {name: value for name, value in entry.items() if name not in ("loss", "each")}
            for entry in rows
        ]
    )


def row(
    task: str, method: str, runs: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    each = [run["accuracy"] for run in runs]
    return {
        "task": task,
        "way": method,
        "accuracy": statistics.fmean(each),
        "deviation": deviation(each),
        **beside(each, [run["accuracy"] for run in full]),
        "each": each,
        "loss": [
            statistics.fmean(part) for part in zip(*(run["loss"] for run in runs), strict=True)
        ],
    }


def trained(job: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracy and losses of each codec."""
    result: dict[str, Any] = found_by(__file__, job, RANKS, None, seconds=3600)
    for method, runs in result.items():
        print(f"{job['task']}, seed {job['seed']}, {method}: {runs['accuracy']:.2%}", flush=True)
    return result


def rank(job: dict[str, Any]) -> None:
    """Run one rank: one training per codec."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    results = {
        method: train_run(TASKS[job["task"]](RANKS, job["seed"], job["quick"]), method, job["seed"])
        for method in job["ways"]
    }
    if distributed.get_rank() == 0:
        Path(job["path"]).write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


def train_run(training: Training, method: str, seed: int) -> dict[str, Any]:
    ddp, rank_index = DistributedDataParallel(training.model), distributed.get_rank()
    optimizer = training.optimizer(ddp.parameters(), training.rate)
    handle = None
    if method.startswith("duo"):
        handle = compress(ddp, method, optimizer=optimizer, seed=seed)
    elif method == PEER:
        begins = max(2, round(PEER_BEGINS * training.steps))
        state = powerSGD_hook.PowerSGDState(None, PEER_RANK, begins, random_seed=seed)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method != WHOLE:
        compress(ddp, method, seed=seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.rate, total_steps=training.steps + 1
    )
    losses = []
    for parts in training.batches():
        optimizer.zero_grad()
        loss = training.loss(ddp, parts[rank_index])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    if handle is not None:
        handle.flush()
    pieces = min(PARTS, len(losses))
    edges = [len(losses) * index // pieces for index in range(pieces + 1)]
    means = [statistics.fmean(losses[begin:end]) for begin, end in itertools.pairwise(edges)]
    return {"accuracy": training.accuracy(training.model.eval()), "loss": means}


if __name__ == "__main__":
    main()
