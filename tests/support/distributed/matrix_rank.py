"""Rank process that trains with each data-parallel feature of torch.

It is started by tests/distributed. Rank 0 trains in FP32 and the others in low precision. The
result of each feature contains the final parameters and the precisions of the operators.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import qsync_fx
from qsync_fx import Plan
from qsync_fx.distributed import average_by_batch, guard
from tests.support.processes import ranks

LOW = Plan("int8", [("layers.1", "bf16")])
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Head(nn.Module):
    """Norm and output layer, and a layer that only some inputs use."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.side, self.last = norm, nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, side: bool) -> Tensor:
        x = self.norm(x)
        if side:
            x = x + self.side(x)
        return self.last(x)


class Net(nn.Module):
    """Model of blocks, which FSDP2 shards separately, and a head."""

    def __init__(self, norm: bool = False, saves: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = Head(nn.BatchNorm1d(16) if norm else nn.LayerNorm(16))
        self.saves = saves

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.saves else layer(x)
        return self.head(x, side)


def build(**net_options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**net_options)


def compiled(model: nn.Module) -> Any:
    plan = LOW if distributed.get_rank() else Plan.uniform("fp32")
    return torch.compile(
        model, backend="qsync", options={"plan": plan, "inner_backend": "aot_eager"}
    )


def batches(count: int = STEPS, samples: int = 8) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + distributed.get_rank())
    for _ in range(count):
        yield torch.randn(samples, 16, generator=generator)


def train(
    called: Any, data: Iterator[Tensor] | None = None, optimizer: Any = None, **inputs: Any
) -> None:
    optimizer = optimizer or torch.optim.SGD(called.parameters(), lr=0.05, momentum=0.9)
    for x in data or batches():
        optimizer.zero_grad()
        called(x, **inputs).square().mean().backward()
        optimizer.step()


def parallel(
    model: nn.Module | None = None, inside: bool = True, several: bool = False, **ddp_options: Any
) -> Any:
    """Return a model in DistributedDataParallel, compiled inside or outside of it."""
    model = model or build()
    # By default the first bucket has 1 MiB. PowerSGD over gloo crashes with several buckets.
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 512 if several else 2**20  # type: ignore[attr-defined]
    ddp_options = {"bucket_cap_mb": 0.001, **ddp_options} if several else ddp_options
    return (
        DistributedDataParallel(compiled(model), **ddp_options)
        if inside
        else compiled(DistributedDataParallel(model, **ddp_options))
    )


def trained(called: Any, **train_options: Any) -> Any:
    with guard(called, check_every=1):
        train(called, **train_options)
    return called


def optimize_ddp_off() -> Any:
    with torch._dynamo.config.patch(optimize_ddp=False):
        return trained(parallel(inside=False))


def branches() -> Any:
    return trained(parallel(find_unused_parameters=True), side=distributed.get_rank() == 0)


def no_sync() -> Any:
    called = parallel()
    optimizer = torch.optim.SGD(called.parameters(), lr=0.05)
    with guard(called, check_every=1):
        for x in batches():
            optimizer.zero_grad()
            with called.no_sync():
                called(x).square().mean().backward()
            called(-x).square().mean().backward()
            optimizer.step()
    return called


def joined(weighted: bool = False) -> Any:
    called = parallel()
    if weighted:
        average_by_batch(called)
    rank = distributed.get_rank()
    with guard(called), called.join():
        train(called, batches(2 + rank, 4 + 2 * rank if weighted else 8))
    return called


def zero() -> Any:
    called = parallel()
    optimizer = ZeroRedundancyOptimizer(
        called.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    return trained(called, optimizer=optimizer)


def hooked(hook: Callable[[], tuple[Any, Any]]) -> Any:
    called = parallel()
    called.register_comm_hook(*hook())
    return trained(called)


def sharded(shape: tuple[int, ...]) -> Any:
    model = build()
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(compiled(model))


def not_a_number() -> Any:
    called = parallel()
    with guard(called, check_every=1):
        train(called, (x * (float("nan") if distributed.get_rank() == 1 else 1) for x in batches()))
    return called


def cases(world: int) -> dict[str, Callable[[], Any]]:
    def power() -> tuple[Any, Any]:
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook

    return {
        "DDP(compile)": lambda: trained(parallel()),
        "compile(DDP), several buckets": lambda: trained(parallel(inside=False, several=True)),
        "DDP(compile), several buckets": lambda: trained(parallel(several=True)),
        "compile(DDP)": lambda: trained(parallel(inside=False)),
        "compile(DDP), optimize_ddp off": optimize_ddp_off,
        "bucket view": lambda: trained(parallel(gradient_as_bucket_view=True)),
        "static graph": lambda: trained(parallel(static_graph=True)),
        "different branches": branches,
        "no_sync": no_sync,
        "join": joined,
        "join, weighted": lambda: joined(weighted=True),
        "ZeRO": zero,
        "checkpointing": lambda: trained(parallel(build(saves=True))),
        "fp16 hook": lambda: hooked(lambda: (None, default_hooks.fp16_compress_hook)),
        "PowerSGD": lambda: hooked(power),
        "batch norm": lambda: trained(parallel(build(norm=True))),
        "FSDP2": lambda: sharded((world,)),
        "HSDP": lambda: sharded((world, 1)),
        "NaN on one rank": not_a_number,
    }


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def outcome(called: Any) -> dict[str, Any]:
    parameters = [whole(p) for p in called.parameters()]
    start = list(build().parameters())
    applied = qsync_fx.plan_coverage(called)
    return {
        "weights": hashlib.sha256(b"".join(p.numpy().tobytes() for p in parameters)).hexdigest(),
        "moved": len(parameters) == len(start)
        and any(not torch.equal(p, q) for p, q in zip(parameters, start, strict=True)),
        "finite": all(bool(p.isfinite().all()) for p in parameters),
        "precisions": sorted(
            {str(ran.precision) for ran in applied.operators if ran.kind == "adjustable"}
        ),
        "uncovered": len(applied.uncovered),
        "graphs": counters["stats"]["unique_graphs"],
    }


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    rank, world, folder, job = ranks.join(arguments)
    if job.get("checkpoint"):
        results = checkpointed(world, Path(job["checkpoint"]))
    else:
        results, makers = {}, cases(world)
        for name in job["cases"]:
            # If a feature hangs, dump its stack and exit; earlier results are in the file.
            faulthandler.dump_traceback_later(job["each"], exit=True)
            torch.compiler.reset()
            counters.clear()
            results[name] = outcome(makers[name]())
            ranks.write(folder, rank, results)
        faulthandler.cancel_dump_traceback_later()
    ranks.write(folder, rank, results)
    with contextlib.suppress(RuntimeError):
        distributed.barrier()
    os._exit(0)


def checkpointed(world: int, folder: Path) -> dict[str, Any]:
    """Train and save on three ranks, or load and continue on two under another plan."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    called = compiled(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(called, optimizer=optimizer)
    if world == 3:
        state, moments = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)
        return {"saved": outcome(called)}
    state, moments = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    loaded = outcome(called)
    qsync_fx.switch_plan(called, Plan.uniform("bf16" if distributed.get_rank() else "int8"))
    train(called, optimizer=optimizer)
    return {
        "loaded": loaded,
        "trained": outcome(called),
        "steps": int(next(iter(optimizer.state.values()))["step"]),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
