"""Rank process that saves and resumes training with compressed gradients."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.distributed import TrainingState
from qsync_fx.plan_switching import options_of
from tests.support.processes import ranks

BEFORE, AFTER = 3, 3


class Job:
    """Model with compressed gradients, and its optimizer."""

    def __init__(self, precision: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        options = {"precision": precision, "inner_backend": "aot_eager"}
        self.ddp = DistributedDataParallel(torch.compile(model, backend="qsync", options=options))
        self.handle = qsync_fx.distributed.compress(self.ddp, "1bit")
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.01)
        self.state = TrainingState(self.ddp, self.handle)

    def train(self, rank: int, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + rank)
            self.optimizer.zero_grad()
            self.ddp(torch.randn(16, 64, generator=generator)).square().mean().backward()
            self.optimizer.step()
        self.handle.wait()

    def states(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.ddp, self.optimizer)
        return {"model": model, "optimizer": optimizer, "qsync": self.state}


def resume(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train, save and continue; load into a new job and continue; compare the parameters."""
    warnings.simplefilter("ignore")
    folder, later = f"{job['where']}/checkpoint", range(BEFORE, BEFORE + AFTER)
    first = Job("int8" if rank else "bf16")
    first.train(rank, range(BEFORE))
    plan = qsync_fx.Plan("int8", [("0", "bf16")])
    qsync_fx.switch_plan(first.ddp, plan)
    dcp.save(first.states(), checkpoint_id=folder)
    first.train(rank, later)
    second = Job("fp32")
    torch.manual_seed(17)
    states = second.states()
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        second.ddp,
        second.optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    second.train(rank, later)
    pairs = zip(first.ddp.parameters(), second.ddp.parameters(), strict=True)
    equal = [torch.equal(a, b) for a, b in pairs]
    return {"equal": equal, "plan": options_of(second.ddp)[0].plan == plan}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:], meet=lambda name: True)
