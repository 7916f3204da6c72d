"""Accuracy of data-parallel training with compressed gradients, and loss curves of DUO.
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
from qsync_fx.serialization.atomic_files import write_text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication.ranks import found_by, told
from benchmarks.paper.support.curves import picture
from benchmarks.paper.support.experiment import OPTIONS, beside
from benchmarks.paper.support.kept import Kept
from benchmarks.paper.support.studied import SIZES, TASKS, Training
from benchmarks.support.harness import arguments, selected, show, standing, to_write, write_json

RANKS = 2
WHOLE = "fp32"
PEER = "powerSGD_hook"
WAYS = (WHOLE, "1bit", "1bit*", "qsgd2", "qsgd4", "qsgd8", "duo0", "duo1", "duo2", PEER)
CURVES = (WHOLE, "qsgd2", "duo0", "duo1", "duo2")
"""Codecs in the loss curves."""
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
            "help": "a way beside FP32, once or more; by default all",
        },
        picture={"type": to_write, "help": "where DUO's curves of loss are drawn (SVG)"},
    )
    torch.set_num_threads(1)
    kept = Kept(None if options.quick else options.partial / "codec_accuracy.json")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    asked = selected(options, TASKS)
    before = standing(options.json, options.quick) if options.json else []
    ways = [way for way in WAYS if way == WHOLE or way in (options.way or WAYS)]
    rows = [
        one
        for one in before
        if one["task"] in TASKS and (one["task"] not in asked or one["way"] not in ways)
    ]
    for task in asked:
        every = []
        for seed in range(1 if options.quick else options.seeds):
            job = {
                "task": task,
                "size": SIZES[task],
                "seed": seed,
                "ways": ways,
                "quick": options.quick,
            }
            every.append(kept.get(job, lambda job=job: trained(job)))  # type: ignore[misc]
        said = {"date": today, "size": "a few steps" if options.quick else SIZES[task]}
        rows += [
            said | row(task, way, [one[way] for one in every], [one[WHOLE] for one in every])
            for way in ways
        ]
        rows.sort(key=lambda one: (list(TASKS).index(one["task"]), WAYS.index(one["way"])))
        if options.json:
            write_json(options.json, rows, options.quick)
    if options.picture:
        write_text(options.picture, picture(duo_curves(rows), "share of the training, %", "loss"))
    show(
        [
            {name: value for name, value in one.items() if name not in ("loss", "each")}
            for one in rows
        ]
    )


def duo_curves(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the loss curves by task and codec, for tasks that a codec other than FP32 trained."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in rows:
        if one["way"] in CURVES:
            points = [
                (100 * (at + 0.5) / len(one["loss"]), loss) for at, loss in enumerate(one["loss"])
            ]
            panels.setdefault(one["task"], {})[one["way"]] = points
    return {task: curves for task, curves in panels.items() if len(curves) > 1}


def row(
    task: str, way: str, found: Sequence[dict[str, Any]], whole: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    each = [one["accuracy"] for one in found]
    return {
        "task": task,
        "way": way,
        "accuracy": statistics.fmean(each),
        "deviation": statistics.stdev(each) if len(each) > 1 else 0.0,
        **beside(each, [one["accuracy"] for one in whole]),
        "each": each,
        "loss": [
            statistics.fmean(part) for part in zip(*(one["loss"] for one in found), strict=True)
        ],
    }


def trained(job: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracy and losses of each codec."""
    found: dict[str, Any] = found_by(__file__, job, RANKS, None, seconds=3600)
    for way, one in found.items():
        print(f"{job['task']}, seed {job['seed']}, {way}: {one['accuracy']:.2%}", flush=True)
    return found


def rank(job: dict[str, Any]) -> None:
    """Run one rank: one training per codec."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {
        way: one(TASKS[job["task"]](RANKS, job["seed"], job["quick"]), way, job["seed"])
        for way in job["ways"]
    }
    if distributed.get_rank() == 0:
        Path(job["path"]).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def one(training: Training, way: str, seed: int) -> dict[str, Any]:
    ddp, own = DistributedDataParallel(training.model), distributed.get_rank()
    optimizer = training.optimizer(ddp.parameters(), training.rate)
    handle = None
    if way.startswith("duo"):
        handle = compress(ddp, way, optimizer=optimizer, seed=seed)
    elif way == PEER:
        begins = max(2, round(PEER_BEGINS * training.steps))
        state = powerSGD_hook.PowerSGDState(None, PEER_RANK, begins, random_seed=seed)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way != WHOLE:
        compress(ddp, way, seed=seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, training.rate, total_steps=training.steps + 1
    )
    losses = []
    for parts in training.batches():
        optimizer.zero_grad()
        loss = training.loss(ddp, parts[own])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    if handle is not None:
        handle.flush()
    pieces = min(PARTS, len(losses))
    edges = [len(losses) * at // pieces for at in range(pieces + 1)]
    means = [statistics.fmean(losses[begin:end]) for begin, end in itertools.pairwise(edges)]
    return {"accuracy": training.accuracy(training.model.eval()), "loss": means}


if __name__ == "__main__":
    main()
