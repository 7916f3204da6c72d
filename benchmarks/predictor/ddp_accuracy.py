"""Foreseen against real: two ranks with gloo on this machine, each with a mixed plan of its own, that was not measured for the profile.

Both ranks measure at the same time, as they train at the same time: they share memory and cores. First each measures a profile. Then each
pair of plans is compiled under DistributedDataParallel, and all take turns. Before and behind each turn three things of a uniform plan are
measured: steps that each rank makes without sending, a bucket that is sent while nothing is computed, and steps of both ranks together. By
these it is known how fast ranks and network are in these minutes, and what sending takes of a rank that computes, as a profile finds it,
too (`qsync_fx.profiler.links.link_measurement`). Pairs are then foreseen by `qsync_fx.replay` from the profiles and a cluster of the two
ranks
at that pace. All are compared by steps that nothing else made longer.
`floor` is what errors differ by between odd and even rounds; `apart` what the slower rank takes alone, without gradients that travel;
`no overlap` what it takes when they travel once all are whole; `bias` is the mean error with its sign. What was measured is kept in the
folder of --partial, and judged anew where it stands.

Two ranks take two cores for themselves: what else runs falls on the numbers.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx import Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.ddp_judging import BUCKET_MIB, RANKS, REFERENCE, judged
from benchmarks.predictor.replay_accuracy import CASES, PRECISIONS, QUICK, Case, mixed_plans
from benchmarks.support.harness import Row, arguments, finish, folder as made, selected

STEPS = 4
MANY = 2**16
SENDS = 5


class Called(nn.Module):
    """A module that a forward calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def main() -> None:
    if len(sys.argv) > 2 and sys.argv[1] == "--rank":
        rank(int(sys.argv[2]), json.loads(sys.argv[3]))
        return
    options = arguments(
        __doc__,
        only={"help": "one case: bert, resnet, vgg"},
        plans={"type": int, "default": 20, "help": "pairs of plans a model (%(default)s)"},
        partial={
            "type": Path,
            "metavar": "DIR",
            "help": "keep what is measured there; what it has is not measured again",
        },
        rounds={"type": int, "default": 9, "help": "turns a pair (%(default)s)"},
    )
    rows: list[Row] = []
    for name in selected(options, QUICK if options.quick else CASES):
        count, rounds = (2, 2) if options.quick else (options.plans, options.rounds)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            if options.partial is not None:
                folder = str(made(options.partial / name))
            if all((Path(folder) / f"rank-{own}.json").exists() for own in range(RANKS)):
                rows += judged(name, Path(folder))
                continue
            job = {
                "case": name,
                "quick": options.quick,
                "pairs": count,
                "rounds": rounds,
                "folder": folder,
            }
            command = [sys.executable, __file__, "--rank"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            running = [
                subprocess.Popen([*command, str(at), json.dumps(job)], env=environment)
                for at in range(RANKS)
            ]
            if any(process.wait() for process in running):
                raise SystemExit(f"{name}: a rank failed")
            rows += judged(name, Path(folder))
    finish(options, rows, cases=True)


def rank(own: int, job: dict[str, Any]) -> None:
    """What each process does: measures, trains all pairs in turns, and writes what it saw."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(job["folder"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{os.getppid()}", rank=own, world_size=RANKS
    )
    case = (QUICK if job["quick"] else CASES)[job["case"]]()
    # Dynamo compiles a Sequential where code calls it that it traces, and DistributedDataParallel's is none.
    case = replace(case, model=Called(case.model))
    if not all((folder / f"profile-{each}.json").exists() for each in range(RANKS)):
        profile = qsync_fx.measure(
            case.model,
            case.step,
            [case.batch],
            PRECISIONS,
            optimizer=case.optimizer,
            repeats=job["rounds"],
            sensitivity=None,
            progress=False,
        )
        dist.barrier()
        profile.save(folder / f"profile-{own}.json")
    ids = [str(op_id) for op_id in qsync_fx.explain(case.model, case.batch[0]).plan().operators]
    plans = list(mixed_plans(ids, RANKS * job["pairs"]).values())[own::RANKS]
    turns: list[list[float]] = []
    known: list[list[tuple[float, float, float]]] = []
    uniform = Plan.uniform(REFERENCE)
    # All versions are of one function, of which Dynamo keeps few.
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
        steps = [training(case, plan) for plan in plans]
        alone, together = (training(case, uniform, parallel) for parallel in (False, True))

        def reference() -> tuple[float, float, float]:
            return timed(alone), sending(), timed(together)

        for _ in range(job["rounds"]):
            known.append([reference()])
            turns.append([])
            for step in steps:
                turns[-1].append(timed(step))
                known[-1].append(reference())
    found = {"turns": turns, "known": known, "plans": [plan.to_json() for plan in plans]}
    (folder / f"rank-{own}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Callable[[], None]) -> float:
    """Returns the seconds of a step, which all ranks begin at once."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS


def sending() -> float:
    """Returns the seconds that a bucket travels while nothing is computed."""
    bucket = torch.zeros(BUCKET_MIB * 2**20 // 4)
    found = []
    for _ in range(SENDS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(bucket)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def training(
    case: Case,
    plan: Plan,
    parallel: bool = True,
    bucket_mib: float | None = BUCKET_MIB,
    sends: Callable[[DistributedDataParallel], object] = lambda wrapped: None,
) -> Callable[[], None]:
    """Returns a step of a copy of the model under a plan, compiled and run until DDP, if it is parallel, has built its buckets anew.

    Args:
        bucket_mib: of DDP's buckets; its own where None.
        sends: says how gradients are sent, where not as DDP does.
    """
    model = copy.deepcopy(case.model)
    wrapped: nn.Module = model
    if parallel:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mib)
        sends(wrapped)
    kind = type(case.optimizer)
    keywords = {
        name: value for name, value in case.optimizer.defaults.items() if name in ("lr", "momentum")
    }
    optimizer = kind(model.parameters(), **keywords)
    options: dict[str, Any] = {"plan": plan}
    compiled = torch.compile(wrapped, backend="qsync", options=options, dynamic=False)

    def step() -> None:
        case.step(compiled, case.batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


if __name__ == "__main__":
    main()
