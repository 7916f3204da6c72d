"""Foreseen against real: two ranks with gloo on this machine, each with a mixed plan of its own, that was not measured for the profile.

Both ranks measure at the same time, as they train at the same time: they share memory and cores. First each measures a profile, and how
long all-reduces take and what of that they take of a rank that computes. Then each pair of plans is compiled under
DistributedDataParallel, and pairs take turns with steps of a uniform plan that each rank makes without sending: what these take longer
than their profile says, the machine is slower by than when the profile was measured, and `pace` is what devices are replayed at. A step is
foreseen by `qsync_fx.replay` from the profiles and a cluster of the two ranks. `floor` is what the same pairs differ by between odd and
even rounds; `apart` what the slower rank takes alone, without gradients that travel; `no overlap` what it takes when they travel once all
are whole; `bias` is the mean error with its sign. What was measured is kept in the folder of --partial, and judged anew where it stands.

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
from qsync_fx import Plan, Profile
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.cluster_parts import Buckets, Device, Network

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.replay_accuracy import CASES, PRECISIONS, QUICK, Case, errors, mixed_plans
from benchmarks.support.harness import Row, arguments, finish, folder as made, selected

RANKS = 2
BUCKET_MIB = 5
"""Smaller than DDP's own, so that models of these sizes send several."""
STEPS = 4
REFERENCE = "bf16"
MANY = 2**16


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
            job = {"case": name, "quick": options.quick, "pairs": count, "rounds": rounds, "folder": folder}
            command = [sys.executable, __file__, "--rank"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            running = [subprocess.Popen([*command, str(at), json.dumps(job)], env=environment) for at in range(RANKS)]
            if any(process.wait() for process in running):
                raise SystemExit(f"{name}: a rank failed")
            rows += judged(name, Path(folder))
    finish(options, rows)


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
            rounds=job["rounds"],
            sensitivity=None,
            progress=False,
        )
        dist.barrier()
        profile.save(folder / f"profile-{own}.json")
    ids = [str(op_id) for op_id in qsync_fx.explain(case.model, case.batch[0]).plan().operators]
    plans = list(mixed_plans(ids, RANKS * job["pairs"]).values())[own::RANKS]
    seconds: list[list[float]] = [[] for _ in plans]
    reference: list[float] = []
    # All versions are of one function, of which Dynamo keeps few.
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
        steps = [training(case, plan) for plan in plans]
        alone = training(case, Plan.uniform(REFERENCE), parallel=False)
        for _ in range(job["rounds"]):
            for step, into in [(alone, reference), *zip(steps, seconds, strict=True)]:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step()
                into.append((time.perf_counter() - begin) / STEPS)
    found = {"seconds": seconds, "reference": reference, "plans": [plan.to_json() for plan in plans]}
    (folder / f"rank-{own}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def training(case: Case, plan: Plan, parallel: bool = True) -> Callable[[], None]:
    """Returns a step of a copy of the model under a plan, compiled and run until DDP, if it is parallel, has built its buckets anew."""
    model = copy.deepcopy(case.model)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB) if parallel else model
    kind = type(case.optimizer)
    keywords = {name: value for name, value in case.optimizer.defaults.items() if name in ("lr", "momentum")}
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


def judged(name: str, folder: Path) -> list[Row]:
    """Returns how far off what was foreseen is."""
    found = [json.loads((folder / f"rank-{own}.json").read_text()) for own in range(RANKS)]
    profiles = {f"rank {own}": Profile.load(folder / f"profile-{own}.json", any_machine=True) for own in range(RANKS)}
    pairs = list(zip(*(one["plans"] for one in found), strict=True))
    # Ranks leave a step together, but for their optimizers: the mean of both is the step's time.
    every = [
        [statistics.mean(both) for both in zip(*(one["seconds"][at] for one in found), strict=True)]
        for at in range(len(pairs))
    ]
    real = {str(at): statistics.median(turns) for at, turns in enumerate(every)}
    pace = {
        key: statistics.median(one["reference"]) / qsync_fx.replay(Plan.uniform(REFERENCE), profile).seconds
        for one, (key, profile) in zip(found, profiles.items(), strict=True)
    }
    links = profiles["rank 0"].collectives[0]
    table = [(float(nbytes), seconds) for nbytes, seconds in links.seconds]
    busy = Network(all_reduce=table, ranks=RANKS, busy=links.busy)
    alone = replace(busy, busy=0.0)
    ways = {
        "replayed": (busy, False, None),
        "replayed, nothing is copied": (busy, False, 0.0),
        "replayed, sending takes no core": (alone, False, None),
        "no overlap": (alone, True, None),
    }
    limit = BUCKET_MIB * 2**20
    rows: list[Row] = []
    for way, (network, whole, copies) in ways.items():
        cluster = Cluster(
            {key: Device(copies=copies, slowdown=pace[key]) for key in profiles},
            network,
            Buckets(limit, limit, whole_graphs=whole),
        )
        foreseen = {}
        buckets = 0
        for at, both in enumerate(pairs):
            plans = {key: Plan.from_json(text) for key, text in zip(profiles, both, strict=True)}
            timeline = qsync_fx.replay(plans, profiles, cluster=cluster)
            foreseen[str(at)], buckets = timeline.seconds, len(timeline.played.buckets)
        off, worst = errors(foreseen, real)
        rows.append(
            {
                "case": name,
                "way": way,
                "pairs": len(pairs),
                "buckets": buckets,
                "step_ms": 1e3 * statistics.mean(real.values()),
                "mean_%": off,
                "worst_%": worst,
                "bias_%": 100 * statistics.mean(foreseen[pair] / real[pair] - 1 for pair in real),
                **({"busy": links.busy, "pace": list(pace.values())} if way == "replayed" else {}),
            }
        )
    apart = {
        str(at): max(
            qsync_fx.replay(Plan.from_json(text), profile).seconds * pace[key]
            for text, (key, profile) in zip(both, profiles.items(), strict=True)
        )
        for at, both in enumerate(pairs)
    }
    halves = [{str(at): statistics.median(turns[first::2]) for at, turns in enumerate(every)} for first in (0, 1)]
    for way, (left, right) in {
        "apart": (apart, real),
        "floor: odd against even rounds": (halves[0], halves[1]),
    }.items():
        off, worst = errors(left, right)
        rows.append({"case": name, "way": way, "mean_%": off, "worst_%": worst})
    return rows


if __name__ == "__main__":
    main()
