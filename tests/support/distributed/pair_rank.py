"""Rank process whose weights are compared with two simulated ranks in one process."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from qsync_fx import Plan

PLANS = (Plan.uniform("fp32"), Plan("bf16", patterns=[("second", "fp32")]))
BATCHES = (6, 10)
STEPS = 3


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def parts(step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the inputs and labels of a step by rank."""
    drawn = torch.Generator().manual_seed(step)
    return [
        (torch.randn(batch, 1, 8, 8, generator=drawn), torch.randint(10, (batch,), generator=drawn))
        for batch in BATCHES
    ]


def loss_of(model: Any, part: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(part[0]), part[1])


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(BATCHES)
    )
    model = network()
    options: dict[str, Any] = {"plan": PLANS[rank], "inner_backend": "aot_eager"}
    parallel = torch.compile(
        DistributedDataParallel(model, broadcast_buffers=False), backend="qsync", options=options
    )
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        share = len(BATCHES) * BATCHES[rank] / sum(BATCHES)
        (share * loss_of(parallel, parts(step)[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
