"""Train on ranks that find their own plan, with compressed gradients and a monitor:

torchrun --nproc-per-node 2 examples/train_fleet.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import qsync_fx


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
    target = torch.randn(256, 64)
    torch.manual_seed(rank)
    inputs = [torch.randn(64, 256) for _ in range(20)]
    batches = [(x, x @ target) for x in inputs]

    def loss_of(network: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return mse_loss(network(batch[0]), batch[1])

    plan = qsync_fx.distributed.measure_and_plan(
        model,
        loss_of,
        batches[:1],
        optimizer=torch.optim.Adam(model.parameters()),
        device_class=f"device{rank}",
        precisions=("fp32", "bf16"),
        repeats=3,
        max_replans=1,
        progress=False,
    )
    options: Any = {"plan": plan}
    ddp = DistributedDataParallel(torch.compile(model, backend="qsync", options=options))
    handle = qsync_fx.distributed.compress(ddp, "qsgd8")
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-3)
    monitor = qsync_fx.monitor(ddp, "runs/fleet.csv", compression=handle)
    with qsync_fx.distributed.guard(ddp, check_every=10), monitor:
        for batch in batches:
            optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    print(f"rank {rank}: loss {loss:.2f}, {handle.report().ratio:.2f} of the bytes of FP32")


if __name__ == "__main__":
    main()
