"""Rank process of the tests of stochastic rounding over several processes.

`rounding_rank.py FOLDER` runs under torchrun, which restarts it after it kills itself once.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from tests.support import pages
from tests.support.models.small_models import Perceptron, build, compiled
from tests.support.processes import ranks

REPETITIONS = 200
STEPS, SAVED_AT, KILLED_AT = 6, 3, 4
PAGE = Path(__file__).resolve().parents[3] / "docs" / "reproducibility.md"


def variance(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the summed variance of the mean gradient over repetitions, for 1, 2 and 4 ranks.

    All ranks have the same seed and the same data.
    """
    variances = {}
    for count in (1, 2, 4):
        group = dist.new_group(list(range(count)))
        if rank < count:
            model = build(Perceptron)
            fast = compiled(
                DistributedDataParallel(model, process_group=group),
                precision="int8",
                inner_backend="eager",
            )
            x = torch.randn(32, 16)
            torch.manual_seed(0)
            variances[count] = _variance([_gradient(model, fast, x) for _ in range(REPETITIONS)])
        dist.barrier()
    return {"variance": variances, "generator": _digest(torch.get_rng_state())}


def _gradient(model: torch.nn.Module, fast: Any, x: Tensor) -> Tensor:
    model.zero_grad()
    fast(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _variance(gradients: list[Tensor]) -> float:
    return torch.stack(gradients).double().var(0).sum().item()


def whole(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    return train(Path(job["where"]), interrupted=False)


def train(folder: Path, interrupted: bool) -> dict[str, Any]:
    """Train with the checkpoint code of docs/reproducibility.md; kill rank 1 if interrupted."""
    rank, restarted = dist.get_rank(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    advice: dict[str, Any] = {"torch": torch, "qsync_fx": qsync_fx}
    (block,) = (
        b for b in pages.blocks(PAGE.read_text()) if b.values.get("name") == "checkpoint.py"
    )
    exec(block.text, advice)

    # Seed a restarted run differently, so that only the checkpoint restores the generator.
    torch.manual_seed(restarted)
    model = build(lambda: Perceptron(0.5), seed=restarted)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))
    parallel = DistributedDataParallel(model)
    fast = compiled(parallel, precision="int8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    path, first = folder / f"{rank}.pt", 0
    if path.exists():
        first = advice["load"](path, model, optimizer)
    losses = []
    for step in range(first, STEPS):
        if step == SAVED_AT and not restarted:
            advice["save"](path, model, optimizer, step)
            dist.barrier()
        if step == KILLED_AT and interrupted and not restarted and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = fast(x[torch.randperm(64)[:16]]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "first": first,
        "losses": losses[SAVED_AT - first :],
        "weights": _digest(weights),
        "generator": _digest(torch.get_rng_state()),
    }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def interrupted(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks.write(folder, dist.get_rank(), train(folder, interrupted=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        interrupted(Path(sys.argv[1]))
    else:
        ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
