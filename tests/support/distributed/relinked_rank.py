"""Rank process of a training whose link slows down, in a network namespace."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.distributed import Replanning, check_replicas, compress, guard
from tests.support.distributed.guarded_rank import weights
from tests.support.processes import ranks

WIDTH, BATCH, TARGET = 384, 64, 0.2
"""FP32 gradients need 0.02 s at 500 Mbit/s and 0.48 s at 20; the target of a step is 0.2 s."""
STEPS, FROM = 44, 10
INNER = {"inner_backend": "aot_eager"}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(folder: Path, rank: int) -> dict[str, Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    plan = qsync_fx.distributed.measure_and_plan(
        model,
        loss_of,
        [batch(rank, 0)],
        optimizer=optimizer,
        device_class="cpu",
        precisions=["fp32"],
        target=TARGET,
        codecs=("qsgd8", "qsgd4"),
        max_replans=0,
        repeats=2,
        progress=False,
    )
    compiled: Any = torch.compile(model, backend="qsync", options={"plan": plan, **INNER})
    parallel = DistributedDataParallel(compiled)
    handle = compress(parallel, plan, check_every=5)
    # Replan only for links, not for other load of the machine.
    settings = Replanning(
        plan,
        tolerance=1000.0,
        patience=4,
        cooldown=12,
        links=1.0,
        compression=handle,
        free=lambda: None,
    )
    with guard(parallel, check_every=5, same_batch=False, replan=settings) as training:
        for step in range(STEPS):
            if step == FROM:
                distributed.barrier()
                (folder / f"{rank}.there").touch()
                while not (folder / "changed").exists():
                    time.sleep(0.02)
                distributed.barrier()
            optimizer.zero_grad()
            loss_of(parallel, batch(rank, step)).backward()
            optimizer.step()
        active: Any = training.plan
    check_replicas(model)
    return {
        "before": dict(plan.codecs),
        "note": plan.notes["link"],
        "after": dict(active.codecs),
        "replanned": [decided.to_dict() for decided in training.replanned],
        "told": [str(decided) for decided in training.replanned],
        "weights": hashlib.sha256(weights(model).encode()).hexdigest(),
        "report": str(handle.report()),
        "name": handle.report().codec,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    ranks.write(
        Path(sys.argv[1]),
        distributed.get_rank(),
        trained(Path(sys.argv[1]), distributed.get_rank()),
    )
    distributed.barrier()
    os._exit(0)
