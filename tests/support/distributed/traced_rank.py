"""Rank of a profiled data-parallel run: writes kineto-RANK.json and execution-RANK.json."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

BUCKET_MIB = 1
STEPS = 2


def model() -> nn.Module:
    """Return a model of four linear layers with 4.5 MiB of parameters."""
    return nn.Sequential(
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.Linear(512, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.Linear(512, 8),
    )


def main(rank: int, ranks: int, folder: str) -> list[int]:
    """Train and trace; return the parameter indices in the order of their gradients."""
    torch.set_num_threads(1)
    where = Path(folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    inner = model()
    arrival: list[int] = []
    for index, parameter in enumerate(inner.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrival.append(index))
    wrapped = DistributedDataParallel(inner, bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    x = torch.randn(64, 256)
    observer = ExecutionTraceObserver().register_callback(str(where / f"execution-{rank}.json"))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=3, active=STEPS, repeat=1),
        record_shapes=True,
        execution_trace_observer=observer,
    ) as profiler:
        for _ in range(3 + STEPS):
            arrival.clear()
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(where / f"kineto-{rank}.json"))
    dist.destroy_process_group()
    return arrival


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
