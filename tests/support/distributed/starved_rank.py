"""Rank process whose gloo threads get little CPU time, started by tests/distributed.

Gloo's thread acquires the GIL to free a completed all-reduce of a backward pass. It does so long
after the main thread has the result.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.distributed import guard
from tests.support.processes import ranks


def starve(cpu: int) -> None:
    """Restrict gloo's threads to idle time of one CPU, and occupy that CPU for 10 seconds."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "pt_gloo_runloop":
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(int(task.name), {cpu})
    busy = subprocess.Popen(["timeout", "10", "sh", "-c", "while :; do :; done"])
    os.sched_setaffinity(busy.pid, {cpu})


def main() -> None:
    torch.set_num_threads(1)
    rank, _, folder, _ = ranks.join(sys.argv[1:])
    model = DistributedDataParallel(nn.Linear(8, 4))
    with guard(model):
        for step in range(4):
            if step == 3:
                starve(sorted(os.sched_getaffinity(0))[-1])
            model(torch.randn(4, 8)).square().mean().backward()
    ranks.write(folder, rank, "trained")
    distributed.destroy_process_group()


main()
