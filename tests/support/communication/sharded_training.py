"""Model and training loop for the tests of compressed gradients with FSDP2."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Network(nn.Module):
    """Model of odd sizes with FSDP units, an optional layer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 65)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(65, 65), nn.LayerNorm(65)) for _ in range(3)
        )
        self.aside, self.last = nn.Linear(65, 65), nn.Linear(65, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor, aside: bool = True) -> Tensor:
        x = torch.relu(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x + (self.aside(x) if aside else 0)) * self.frozen.sum()


def model(**fsdp_options: Any) -> Any:
    torch.manual_seed(0)
    network = Network()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in network.blocks:
        fully_shard(block, mesh=mesh, **fsdp_options)
    fully_shard(network, mesh=mesh, **fsdp_options)
    # gloo does not support averages, so reduce by sum
    for module in network.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return network


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 37, generator=torch.Generator().manual_seed(1000 * rank + step))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(
    model: Any, optimizer: Any, steps: range, aside: Callable[[int], bool] = lambda step: True
) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(distributed.get_rank(), step), aside=aside(step)).square().mean().backward()
        optimizer.step()


def shards(model: nn.Module) -> list[Tensor]:
    return [p.to_local() for p in model.parameters()]  # type: ignore[operator]


def weights(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in shards(model))).hexdigest()


def gradients(model: Any, rank: int, step: int = 0) -> list[Tensor]:
    """Return this rank's shards of the gradients of one step."""
    for p in model.parameters():
        p.grad = None
    model(batch(rank, step)).square().mean().backward()
    return [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]


def whole(rank: int, world: int, like: Any) -> list[Tensor]:
    """Return this rank's shards of the exact mean gradients, summed in rank order."""
    torch.manual_seed(0)
    network = Network()
    sums: list[Tensor] = []
    for other in range(world):
        network.zero_grad()
        network(batch(other, 0)).square().mean().backward()
        gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
        sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
    means = [total / world for total in sums]
    return [_shard(mean, rank, world) for mean in means]


def _shard(tensor: Tensor, rank: int, world: int) -> Tensor:
    rows = -(-tensor.shape[0] // world)
    return tensor[rows * rank : rows * (rank + 1)]


def apart(ones: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference relative to the largest value."""
    pairs = [(a, b) for a, b in zip(ones, others, strict=True) if a.numel()]
    return max(float((a - b).abs().max()) for a, b in pairs) / max(
        float(b.abs().max()) for _, b in pairs
    )
