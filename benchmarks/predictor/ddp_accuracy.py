"""Error of predicted DistributedDataParallel steps of two gloo ranks on this machine.
Each rank has its own mixed plan, which the profiles do not contain. The ranks measure their
profiles concurrently, because they share memory bandwidth and cores in training. Then each pair of
plans is compiled, and all pairs run interleaved. Around each run a uniform plan is measured: each
rank's step without communication, an all-reduce of one bucket on idle ranks, and a DDP step. These
calibrate the speed of ranks and network at that time, and the slowdown of a rank that communicates.
`qsync_fx.replay` predicts each pair from the profiles and this calibration. "method" names the
predictor or an ablation: "without communication" is the slower rank alone, "no overlap"
communicates after the backward pass, and "floor" is the difference between odd and even rounds.
Columns: "mean_%" and "worst_%" are absolute errors of the step time, "bias_%" is the mean signed
error, and "each_%" lists the signed errors. All times are statistics of the faster half of the
samples. Complete measurements in the folder of --partial are evaluated again without measuring. The
two ranks need two idle cores.
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

from benchmarks.predictor.ddp_judging import BUCKET_MIB, RANKS, REFERENCE, prediction_rows
from benchmarks.predictor.replay_accuracy import CASES, PRECISIONS, QUICK, Case, mixed_plans
from benchmarks.support.harness import Row, arguments, by_size, finish, folder as made, selected

STEPS = 4
MANY = 2**16
SENDS = 5


class Called(nn.Module):
    """Module whose forward calls another module."""

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
            "help": "folder for measurements; those in it are not repeated",
        },
        rounds={"type": int, "default": 9, "help": "turns a pair (%(default)s)"},
    )
    rows: list[Row] = []
    for name in selected(options, by_size(options.quick, QUICK, CASES)):
        count, rounds = by_size(options.quick, (2, 2), (options.plans, options.rounds))
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            if options.partial is not None:
                folder = str(made(options.partial / name))
            if all(
                (Path(folder) / f"rank-{rank_index}.json").exists() for rank_index in range(RANKS)
            ):
                rows += prediction_rows(name, Path(folder))
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
                subprocess.Popen([*command, str(index), json.dumps(job)], env=environment)
                for index in range(RANKS)
            ]
            if any(process.wait() for process in running):
                raise SystemExit(f"{name}: a rank failed")
            rows += prediction_rows(name, Path(folder))
    finish(options, rows, by="case")


def rank(rank_index: int, job: dict[str, Any]) -> None:
    """Run one rank: measure the profile, train all pairs interleaved, and write the times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(job["folder"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{os.getppid()}",
        rank=rank_index,
        world_size=RANKS,
    )
    case = (by_size(job["quick"], QUICK, CASES))[job["case"]]()
    # Dynamo compiles a Sequential only if traced code calls it, which is not the case in
    # DistributedDataParallel.
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
        profile.save(folder / f"profile-{rank_index}.json")
    ids = [str(op_id) for op_id in qsync_fx.explain(case.model, case.batch[0]).plan().operators]
    plans = list(mixed_plans(ids, RANKS * job["pairs"]).values())[rank_index::RANKS]
    turns: list[list[float]] = []
    known_steps: list[list[tuple[float, float, float]]] = []
    uniform = Plan.uniform(REFERENCE)
    # All versions compile one function, for which Dynamo limits the number of recompilations.
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
        steps = [training(case, plan) for plan in plans]
        alone, together = (training(case, uniform, parallel) for parallel in (False, True))

        def reference() -> tuple[float, float, float]:
            return timed(alone), sending(), timed(together)

        for _ in range(job["rounds"]):
            known_steps.append([reference()])
            turns.append([])
            for step in steps:
                turns[-1].append(timed(step))
                known_steps[-1].append(reference())
    result = {"turns": turns, "known": known_steps, "plans": [plan.to_json() for plan in plans]}
    (folder / f"rank-{rank_index}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def timed(step: Callable[[], None]) -> float:
    """Return the seconds of a step, started by all ranks at the same time."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begin) / STEPS


def sending() -> float:
    """Return the median seconds of an all-reduce of one bucket on idle ranks."""
    bucket = torch.zeros(BUCKET_MIB * 2**20 // 4)
    times = []
    for _ in range(SENDS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(bucket)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def training(
    case: Case,
    plan: Plan,
    parallel: bool = True,
    bucket_mib: float | None = BUCKET_MIB,
    sends: Callable[[DistributedDataParallel], object] = lambda wrapped: None,
) -> Callable[[], None]:
    """Return a compiled step of a copy of the model, warmed up until DDP has rebuilt its buckets.

    Args:
        bucket_mib: bucket size in MiB; None for DDP's default.
        sends: installs a communication hook on the DDP module; by default none.
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
