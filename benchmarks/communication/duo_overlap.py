"""Steps of DUO by the number of micro-batches: how much of the slow reduction is hidden.
Two ranks train an MLP with 7 MB of gradients over a link of 100 Mbps (links.py; loopback without
root). Gradients are accumulated under no_sync over 1 to 16 micro-batches. "none" has no reduction,
"1bit*" has only the fast reduction of "duo1", and "fp32" is DistributedDataParallel alone. They run
interleaved. Columns: median "seconds" of a step; "exposed" is the time above "none", which has
only the passes. "hidden" is the time by which DUO's step is shorter than both reductions in
turn, relative to the time that can hide: the shorter of the passes and the FP32 reduction.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.distributed import compress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication import links
from benchmarks.communication.ranks import found_by, requested_job
from benchmarks.support.harness import Row, arguments, by_size, finish

RATE = "100mbit"
NONE, FAST, DUO, FULL = "none", "1bit*", "duo1", "fp32"
MICRO_BATCHES = (1, 2, 4, 8, 16)
SAMPLES, INPUTS, WIDTH, CLASSES = 256, 784, 1024, 10
"""Samples of a micro-batch, and the widths of the MLP."""


def main() -> None:
    if (job := requested_job()) is not None:
        rank(job)
        return
    options = arguments(
        __doc__, repeats={"type": int, "default": 7, "help": "steps of each (%(default)s)"}
    )
    torch.set_num_threads(1)
    rate = RATE if links.told_missing("loopback") is None else None
    job = {
        "counts": by_size(options.quick, MICRO_BATCHES[:2], MICRO_BATCHES),
        "repeats": by_size(options.quick, 2, options.repeats),
    }
    measured = found_by(__file__, job, 2, rate, seconds=1800)
    finish(options, [row for count in job["counts"] for row in rows(measured, rate, count)])


def rows(measured: dict[str, Any], rate: str | None, count: int) -> list[Row]:
    seconds = {
        method: statistics.median(by[str(count)]) for method, by in measured["seconds"].items()
    }
    passes, slow = seconds[NONE], seconds[FULL] - seconds[NONE]
    hidden = (seconds[FAST] + slow - seconds[DUO]) / min(passes, slow)
    return [
        {
            "rate": rate or "loopback",
            "micro-batches": count,
            "method": method,
            "seconds": value,
            "exposed": value - passes,
            "hidden": hidden if method == DUO else None,
        }
        for method, value in seconds.items()
    ]


def rank(job: dict[str, Any]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    trainings = [Training(method) for method in (NONE, FAST, DUO, FULL)]
    seconds: dict[str, dict[int, list[float]]] = {
        training.method: {count: [] for count in job["counts"]} for training in trainings
    }
    for count in job["counts"]:
        for turn in range(job["repeats"] + 1):
            for training in trainings:
                distributed.barrier()
                # The first of two steps starts the slow reduction that the second one hides. A
                # barrier between them would wait for it.
                training.step(count)
                begin = time.perf_counter()
                training.step(count)
                if turn:
                    seconds[training.method][count].append(time.perf_counter() - begin)
                training.flush()
    if distributed.get_rank() == 0:
        Path(job["path"]).write_text(json.dumps({"seconds": seconds}))
    distributed.barrier()
    distributed.destroy_process_group()


class Training:
    """Training of an MLP with one method of reducing gradients."""

    def __init__(self, method: str) -> None:
        self.method = method
        layers = [nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.01, momentum=0.9)
        self.inputs = torch.randn(SAMPLES, INPUTS)
        self.labels = torch.randint(CLASSES, (SAMPLES,))
        self.handle: Any = None
        if method == DUO:
            self.handle = compress(self.ddp, method, optimizer=self.optimizer)
        elif method == FAST:
            compress(self.ddp, method)

    def step(self, count: int) -> None:
        """Accumulate gradients over `count` micro-batches, reduce them and step."""
        for index in range(count):
            is_reduced = index == count - 1 and self.method != NONE
            with contextlib.nullcontext() if is_reduced else self.ddp.no_sync():
                loss = F.cross_entropy(self.ddp(self.inputs), self.labels) / count
                loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def flush(self) -> None:
        """Wait for DUO's slow reduction."""
        if self.method == DUO:
            self.handle.flush()


if __name__ == "__main__":
    main()
