"""Rank of the tests of unequal batches; tests/distributed runs it as a process."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from qsync_fx import ClusterPlan, OptionError, Plan, RankError
from qsync_fx.distributed import DistributedBatchSampler, average_by_batch
from tests.support.processes import ranks

BATCHES = {"fast": 5, "slow": 2}
PLAN = ClusterPlan(
    {name: Plan.uniform("fp32") for name in BATCHES}, ranks=["fast", "slow"], batches=BATCHES
)
SAMPLES = 17  # two steps of 7 samples, and a last one of 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SAMPLES, 8, generator=draw), torch.arange(SAMPLES))


def loss_of(model: nn.Module, x: Tensor) -> Any:
    """Return the mean over samples of a loss that is not linear in the outputs."""
    return model(x).square().sum(1).mean()


def values(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def sampled(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train two epochs with a plan's local batches; return the samples and parameters."""
    model = DistributedDataParallel(network())
    average_by_batch(model)
    sampler = DistributedBatchSampler(range(SAMPLES), PLAN)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, indices in loader:
            steps.append(indices.tolist())
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    return {"steps": steps, "weights": values(model), "batches": sampler.batches}


def unplanned(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Use a plan without a local batch of the second rank."""
    plan = ClusterPlan(PLAN.classes, ranks=PLAN.ranks, batches={"fast": 5})
    try:
        DistributedBatchSampler(range(SAMPLES), plan)
    except (OptionError, RankError) as error:
        return {"type": type(error).__name__, "what": error.what}
    return {}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], lambda _: True)
