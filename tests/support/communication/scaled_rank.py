"""Rank process of the tests of GradScaler with compression, started by tests/communication."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.communication.codecs.truncation import Truncated
from qsync_fx.distributed import check_replicas, compress
from tests.support.communication.compressed_training import refusal, weights
from tests.support.processes import ranks

CODECS = {"1bit*": "1bit*", "1bit": "1bit", "aqgb12": Truncated(12, feedback=True)}


class Linear(nn.Module):
    """Module whose input is the list of its parameters' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(67, 31)), nn.Parameter(torch.zeros(500))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return (self.first * gradients[0]).sum() + (self.second * gradients[1]).sum()


def given(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(67, 31, generator=generator), torch.randn(500, generator=generator)]


def parallel() -> nn.Module:
    return DistributedDataParallel(Linear(), bucket_cap_mb=0.004)


def sharded() -> nn.Module:
    model = Linear()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]
    return model


def hashed(model: nn.Module) -> str:
    """Return a hash of this rank's parameters or shards."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in local)).hexdigest()


def trained(
    model: nn.Module,
    codec: str,
    steps: list[int],
    scaler: Any,
    with_scaler: bool,
    infinite: tuple[int, ...] = (),
) -> tuple[str, list[int], dict[str, Tensor]]:
    """Return a hash of the parameters, the executed steps and the unscaled error feedback."""
    handle = compress(
        model, CODECS[codec], least=0, scaler=scaler if with_scaler else None, check_every=1
    )
    optimizer, executed = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5), []
    rank, world = distributed.get_rank(), distributed.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        loss = model(given(rank, step)) * (
            float("inf") if step in infinite and rank == world - 1 else 1.0
        )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            executed.append(step)
    if isinstance(model, DistributedDataParallel):
        check_replicas(model)
    saved = handle.state_dict()
    scales = saved["scales"]["sent"]
    return (
        hashed(model),
        executed,
        {name: left / scales[name] for name, left in saved["sent"].items()},
    )


def without(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Compare training under a GradScaler that skips steps with unscaled training without them."""
    make: Callable[[], nn.Module] = {"parallel": parallel, "sharded": sharded}[job["how"]]
    results: dict[str, Any] = {}
    for codec in job["codecs"]:
        for name, start, infinite, with_scaler in (
            ("given", 8.0, (2, 5), True),
            ("beyond", 2.0**126, (), True),
            ("not told", 8.0, (2, 5), False),
        ):
            scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=2)
            end, executed, left = trained(
                make(), codec, list(range(10)), scaler, with_scaler, infinite
            )
            alone = torch.amp.GradScaler("cpu", enabled=False)
            plain, _, expected = trained(make(), codec, executed, alone, True)
            results[f"{codec}, {name}"] = {
                "ends": [end, plain],
                "taken": executed,
                "left": all(torch.equal(left[key], expected[key]) for key in expected),
                "finite": all(bool(values.isfinite().all()) for values in left.values()),
            }
    return results


def resumed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Resume with another scale, and return the errors of invalid scalers."""

    def run(steps: list[int], scale: float, state: Any = None) -> tuple[Any, dict[str, Any]]:
        model = parallel()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
        handle = compress(model, "1bit*", least=0, scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if state is not None:
            model.load_state_dict(state[0])
            handle.load_state_dict(state[1])
        for step in steps:
            optimizer.zero_grad()
            scaler.scale(model(given(rank, step))).backward()
            scaler.step(optimizer)
            scaler.update()
        return model, handle.state_dict()

    uninterrupted, _ = run([0, 1, 2, 3], 1.0)
    half, state = run([0, 1], 4.0)
    again, _ = run([2, 3], 64.0, (half.state_dict(), state))
    results: dict[str, Any] = {"ends": [weights(uninterrupted), weights(again)]}
    refusal(results, "type", lambda: compress(parallel(), "1bit*", scaler=3.0))
    scaler = torch.amp.GradScaler("cpu")
    refusal(results, "some", lambda: compress(parallel(), "1bit*", scaler=scaler if rank else None))
    return results


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
