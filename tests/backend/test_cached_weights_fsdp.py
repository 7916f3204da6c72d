"""The option "cache_quantized_weights" under FSDP: the optimizer updates shards, and torch counts
no write to the gathered weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from qsync_fx import PlanWarning

PASSES = 3  # per step; some of the first uses of a copy are not compared with the weight


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    torch.compiler.reset()
    yield
    distributed.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def losses(once: bool) -> list[float]:
    """Return the losses of steps of several passes for blocks that are compiled, then sharded."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(Block(), Block()), init_device_mesh("cpu", (1,))
    # With rounding to nearest, passes have equal results whether they share a copy or not.
    options = {
        "precision": "int8",
        "inner_backend": "aot_eager",
        "rounding": "nearest",
        "cache_quantized_weights": once,
    }
    for block in model:
        block.compile(backend="qsync", options=options)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for _ in range(4):
        for _ in range(PASSES):
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            results.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return results


def test_gathered_weights_are_requantized_after_each_step() -> None:
    expected = losses(once=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        assert losses(once=True) == expected
