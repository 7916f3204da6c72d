"""Accuracy against training time over slow links, with FP32 or compressed gradients.
Two ranks train an MLP on images. Each rank runs in a network namespace with a link of 1 Gbps or 100
Mbps; without root the ranks use loopback. The peers are DistributedDataParallel in FP32 and its
FP16 hook. All codecs start from the same weights and read the same batches, and run interleaved by
seed. The clock stops during tests. A row is the mean over all seeds: "seconds a step", final
"accuracy" and its standard "deviation", "aim" is FP32's final accuracy minus half a percentage
point, "seconds to aim" the time to reach it, and "curve" lists (seconds, accuracy).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.distributed import compress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication import links
from benchmarks.communication.ranks import found_by, requested_job
from benchmarks.paper.support.experiment import OPTIONS, deviation
from benchmarks.paper.support.images import QUICK, Images, Size, evaluated
from benchmarks.paper.support.run_cache import RunCache
from benchmarks.support.harness import arguments, by_size, show, write_json

RATES = ("1gbit", "100mbit")
WAYS = ("fp32", "fp16", "qsgd8", "qsgd4", "aqgb")
"""FP32 and FP16 are torch's: DistributedDataParallel without and with its compression hook."""
SIZE = Size(samples=6_000, tests=2_000, epochs=3, batch=64)
WIDTH, RATE, LOOKS = 1024, 0.1, 10
"""Width of the MLP, learning rate, and number of tests during a training."""
SHORT = 0.005


def main() -> None:
    if (job := requested_job()) is not None:
        rank(job)
        return
    options = arguments(
        __doc__,
        seeds=OPTIONS["seeds"],
        partial=OPTIONS["partial"],
    )
    torch.set_num_threads(1)
    reason = links.told_missing("loopback")
    partial = RunCache(by_size(options.quick, None, options.partial / "slow_links.json"))
    rows: list[dict[str, Any]] = []
    rates: Sequence[str | None] = by_size(options.quick, RATES[:1], RATES)
    if reason is not None:
        rates = (None,)
    for rate in rates:
        runs: dict[str, list[dict[str, Any]]] = {}
        # Codecs run interleaved: all of them with one seed, then with the next.
        for seed in range(by_size(options.quick, 1, options.seeds)):
            for method in WAYS:
                job = {
                    "rate": rate,
                    "method": method,
                    "seed": seed,
                    "quick": options.quick,
                    "width": WIDTH,
                    "lr": RATE,
                }
                runs.setdefault(method, []).append(partial.get(job, lambda job=job: trained(job)))  # type: ignore[misc]
        aim = statistics.fmean(run["curve"][-1][1] for run in runs["fp32"]) - SHORT
        rows += [row(rate, method, every, aim) for method, every in runs.items()]
        if options.json:
            write_json(options.json, rows, options.quick)
    show([{name: value for name, value in row.items() if name != "curve"} for row in rows])


def row(rate: str | None, method: str, every: list[dict[str, Any]], aim: float) -> dict[str, Any]:
    last = [run["curve"][-1][1] for run in every]
    curve = [
        [
            statistics.fmean(point[0] for point in looks),
            statistics.fmean(point[1] for point in looks),
        ]
        for looks in zip(*(run["curve"] for run in every), strict=True)
    ]
    return {
        "link": rate or "loopback",
        "method": method,
        "seconds a step": statistics.fmean(run["seconds"] for run in every),
        "accuracy": statistics.fmean(last),
        "deviation": deviation(last),
        "aim": aim,
        "seconds to aim": next((seconds for seconds, accuracy in curve if accuracy >= aim), None),
        "curve": curve,
    }


def trained(job: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = found_by(__file__, job, 2, job["rate"], seconds=1800)
    print(f"{job['rate']}, {job['method']}, seed {job['seed']}: {result['curve'][-1]}", flush=True)
    return result


def rank(job: dict[str, Any]) -> None:
    """Run one rank: train, and test at regular intervals."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    size = by_size(job["quick"], QUICK, SIZE)
    images, rank_index = Images(size, by_size(job["quick"], "digits", None)), distributed.get_rank()
    data = images.subset(job["seed"])
    torch.manual_seed(job["seed"])
    inputs, width = data.train[0][0].numel(), job["width"]
    layers = (
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, images.classes),
    )
    model = nn.Sequential(nn.Flatten(), *layers)
    ddp = DistributedDataParallel(model, bucket_cap_mb=2)
    if job["method"] == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif job["method"] != "fp32":
        compress(ddp, job["method"], seed=job["seed"])
    parts = [
        batch[rank_index]
        for epoch in range(size.epochs)
        for batch in images.parts(data, [size.batch] * 2, job["seed"], epoch)
    ]
    optimizer = torch.optim.SGD(ddp.parameters(), job["lr"], momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, job["lr"], total_steps=len(parts) + 1)
    looks = {round((look + 1) * len(parts) / LOOKS) - 1 for look in range(LOOKS)}
    curve, spent = [], 0.0
    distributed.barrier()
    begin = time.perf_counter()
    for step, (x, labels) in enumerate(parts):
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step in looks:
            spent += time.perf_counter() - begin
            curve.append([spent, evaluated(model, data, size.tests)])
            model.train()
            distributed.barrier()
            begin = time.perf_counter()
    if rank_index == 0:
        Path(job["path"]).write_text(json.dumps({"seconds": spent / len(parts), "curve": curve}))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
