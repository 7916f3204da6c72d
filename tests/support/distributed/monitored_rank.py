"""Rank process that trains with compression and a monitor, for test_monitor.py."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from tests.support.processes import ranks

STEPS, LATE = 4, 0.2


def train(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train with a delay on rank 1; return the metrics of each step and the bytes sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    handle = qsync_fx.distributed.compress(ddp, "qsgd8")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    rows: list[dict[str, float]] = []
    path = f"{job['where']}/run.csv"
    to = [lambda step, metrics: rows.append(dict(metrics)), path]
    with qsync_fx.monitor(ddp, to, compression=handle):
        for _ in range(STEPS):
            time.sleep(LATE * rank)
            optimizer.zero_grad()
            ddp(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
    handle.wait()
    return {"rows": rows, "wire": handle.report().tally.wire}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
