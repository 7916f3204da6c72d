"""Rank process of the data-parallel tests, started by test_ddp.py."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx import Plan
from tests.support.models.small_models import Counting

PLANS = {
    "fp32": Plan.uniform("fp32"),
    "mixed": Plan("int8", patterns=[("layers.1", "bf16"), ("/linear", "bf16")]),
}


class Model(nn.Module):
    """Model with several 1 MiB buckets, a reused layer, functions and an optional graph break."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(
            nn.Linear(128 if index == 0 else 512, 512) for index in range(4)
        )
        self.head = nn.Linear(512, 10)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).flatten(1)
        x = torch.relu(self.layers[1](torch.relu(self.layers[0](x))))
        if self.breaks:
            torch._dynamo.graph_break()
        x = torch.relu(self.layers[3](torch.relu(self.layers[2](x))))
        x = torch.tanh(self.layers[3](x))
        return self.head(F.linear(x, self.layers[3].weight))


def main(rank: int, folder: str, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(job["breaks"])
    x, y = torch.randn(16, 1, 8, 8), torch.randint(10, (16,))
    plan = PLANS[job["plans"][rank]]
    undivided = qsync_fx.explain(model, x, options={"plan": plan})

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    operators: list[tuple[str, str]] = []

    @qsync_fx.graph_pass(after="lower")
    def collect(graph: qsync_fx.PrecisionGraph) -> None:
        operators.extend((str(op.id), str(op.precision)) for op in graph.operators())

    backend = Counting()
    fast = backend.compile(parallel, plan=plan, passes=[collect])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)  # each rank has different data
        x = torch.randn(16, 1, 8, 8, generator=generator)
        y = torch.randint(10, (16,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()
    dist.destroy_process_group()
    return {
        "graphs": len(backend.graphs),
        "operators": operators,
        "undivided": [(str(op.id), str(op.precision)) for op in undivided.operators],
        "undivided_graphs": len(undivided.graphs),
        "losses": losses,
        "weights": digest,
        "moved": any(
            not torch.equal(p, q) for p, q in zip(model.parameters(), _start(job), strict=True)
        ),
    }


def _start(job: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    return list(Model(job["breaks"]).parameters())


if __name__ == "__main__":
    rank, folder, job = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    result = main(rank, folder, job)
    with open(f"{folder}/{rank}.part", "w") as file:
        json.dump(result, file)
    os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.json")
