"""Graph splits at the bucket boundaries of DistributedDataParallel, also for a model that was
compiled before it was wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx

WIDTH = 600
"""Layer width: 1.4 MB of weights, which fill a bucket of 1 MiB."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file: Path = tmp_path_factory.mktemp("world") / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def graphs() -> Iterator[list[int]]:
    """Yield a list for the number of adjustable operators of each compiled graph."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def options(graphs: list[int]) -> dict[str, Any]:
    @qsync_fx.graph_pass(after="lower")
    def count(graph: qsync_fx.PrecisionGraph) -> None:
        graphs.append(len(graph.operators("adjustable")))

    return {"precision": "bf16", "inner_backend": "aot_eager", "passes": [count]}


def compiled(model: nn.Module, graphs: list[int]) -> Callable[..., Any]:
    return torch.compile(model, backend="qsync", options=options(graphs))


def step(model: Callable[..., Any]) -> None:
    model(torch.ones(2, WIDTH)).backward()


def test_a_model_that_made_a_step_before_is_split(graphs: list[int]) -> None:
    fast = compiled(Layers(), graphs)
    step(fast)
    assert graphs == [3]
    step(DistributedDataParallel(fast, bucket_cap_mb=1))
    assert graphs == [3, 1, 1, 1]
    # The split and the unsplit graphs are reused.
    step(DistributedDataParallel(fast, bucket_cap_mb=1))
    step(fast)
    assert len(graphs) == 4


def test_in_the_other_order_too(graphs: list[int]) -> None:
    model, same = Layers(), options(graphs)
    step(torch.compile(model, backend="qsync", options=same))
    step(
        torch.compile(
            DistributedDataParallel(model, bucket_cap_mb=1), backend="qsync", options=same
        )
    )
    assert graphs == [3, 1, 1, 1]


def test_single_bucket_is_not_recompiled(graphs: list[int]) -> None:
    fast = compiled(Layers(), graphs)
    step(fast)
    step(DistributedDataParallel(fast, bucket_cap_mb=25))
    assert graphs == [3]


def test_no_recompilation_with_ddp_optimizer_disabled(graphs: list[int]) -> None:
    fast = compiled(Layers(), graphs)
    with torch._dynamo.config.patch(optimize_ddp=False):
        step(fast)
        step(DistributedDataParallel(fast, bucket_cap_mb=1))
    assert graphs == [3]


def test_evaluation_is_not_split(graphs: list[int]) -> None:
    fast = compiled(Layers(), graphs)
    with torch.no_grad():
        fast(torch.ones(2, WIDTH))
        DistributedDataParallel(fast, bucket_cap_mb=1)(torch.ones(2, WIDTH))
    assert graphs == [3]
