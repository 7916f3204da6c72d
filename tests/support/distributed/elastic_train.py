"""Elastic training that torchrun restarts with fewer or more ranks.

    torchrun ... elastic_train.py FOLDER STEPS

Each start plans for the current ranks and continues from the last checkpoint. Each rank writes its
progress to FOLDER/PID.json. Training ends after STEPS steps, once FOLDER/go exists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.distributed import Replanning, check_replicas, guard
from tests.support.distributed.guarded_rank import data, network

EVERY = 4


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def train(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    name = os.environ["DEVICE"]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = qsync_fx.distributed.measure_and_plan(
        model,
        loss_of,
        [data(rank)],
        optimizer=optimizer,
        device_class=name,
        precisions=["fp32"] if name == "fast" else ["fp32", "bf16"],
        progress=False,
        repeats=1,
        max_replans=0,
        save=folder / "plan.json",
    )
    done, latest = 0, folder / "checkpoint"
    if latest.exists():
        state, moments = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": state, "optimizer": moments, "done": torch.tensor(0)}
        checkpoint.load(saved, checkpoint_id=latest)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        done = int(saved["done"])
    parallel = DistributedDataParallel(
        torch.compile(model, backend="qsync", options={"plan": plan, "inner_backend": "aot_eager"})
    )
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    status = {
        "world": world,
        "ranks": plan.ranks,
        "done": done,
        "pid": os.getpid(),
        "restarts": count,
        "device": name,
    }
    with guard(parallel, check_every=2, replan=Replanning(plan, patience=50)):
        while not (done % EVERY == 0 and done >= steps and may_end(folder)):
            optimizer.zero_grad()
            loss_of(parallel, data(100 * done + rank)).backward()
            optimizer.step()
            done += 1
            if done % EVERY == 0:
                state, moments = get_state_dict(model, optimizer)
                part = folder / f"checkpoint-{done}"
                checkpoint.save(
                    {"model": state, "optimizer": moments, "done": torch.tensor(done)},
                    checkpoint_id=part,
                )
                if rank == 0:
                    put(folder, part)
                write(folder, {**status, "reached": done})
                time.sleep(0.1)
    check_replicas(model)
    write(folder, {**status, "reached": done, "ended": True})
    distributed.destroy_process_group()


def may_end(folder: Path) -> bool:
    """Return whether FOLDER/go exists for all ranks."""
    ready = torch.tensor(float((folder / "go").exists()))
    distributed.all_reduce(ready, distributed.ReduceOp.MIN)
    return bool(ready)


def put(folder: Path, part: Path) -> None:
    """Replace the link "checkpoint" by a link to the complete checkpoint `part`."""
    link = folder / "checkpoint.new"
    link.symlink_to(part.name)
    link.replace(folder / "checkpoint")


def write(folder: Path, status: dict[str, Any]) -> None:
    path = folder / f"{status['pid']}.json"
    path.with_suffix(".part").write_text(json.dumps(status))
    path.with_suffix(".part").replace(path)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
