"""Foreseen against real: two ranks with gloo on this machine, each with a mixed plan of its own, that was not measured for the profile.

Both ranks measure at the same time, as they train at the same time: they share memory and cores. First each measures a profile, and how
long all-reduces take and what of that they take of a rank that computes. Then each pair of plans is compiled under
DistributedDataParallel. Before and behind each turn of a pair two things are measured that are known: steps of a uniform plan that each
rank makes without sending, and all-reduces of a bucket alone. What these take longer than the profile says, the machine is slower by in
that minute than when the profile was measured, and `pace` is what devices and network are replayed at; what sending takes of a rank that
computes is measured again in each round, too. A step is foreseen by `qsync_fx.replay` from the profiles and a cluster of the two ranks,
for each turn at its pace; a pair's error is the median of its turns'.
`floor` is what that error differs by between odd and even rounds; `apart` what the slower rank takes alone, without gradients that travel;
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from qsync_fx.predictor.replay.collectives import Measured
from qsync_fx.profiling.measuring.busy import busy
from qsync_fx.profiling.profile import Collective

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.predictor.replay_accuracy import CASES, PRECISIONS, QUICK, Case, errors, mixed_plans
from benchmarks.support.harness import Row, arguments, finish, folder as made, selected

RANKS = 2
BUCKET_MIB = 5
"""Smaller than DDP's own, so that models of these sizes send several."""
STEPS = 4
REFERENCE = "bf16"
MANY = 2**16
SENDS = 5
REPLAYED, APART = "replayed", "apart"
WAYS = (REPLAYED, "replayed, nothing is copied", "replayed, sending takes no core", "no overlap", APART)

Known = tuple[float, float]
"""Seconds of a step without sending, and those that a bucket travels."""


@dataclass(frozen=True)
class Pace:
    """
    Attributes:
        devices: how much longer than in its profile each rank computes.
        network: how much longer than in the table gradients travel.
    """

    devices: list[float]
    network: float


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
    (collective,) = Profile.load(folder / f"profile-{own}.json", any_machine=True).collectives
    ids = [str(op_id) for op_id in qsync_fx.explain(case.model, case.batch[0]).plan().operators]
    plans = list(mixed_plans(ids, RANKS * job["pairs"]).values())[own::RANKS]
    turns: list[list[float]] = []
    known: list[list[Known]] = []
    # All versions are of one function, of which Dynamo keeps few.
    with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
        steps = [training(case, plan) for plan in plans]
        alone = training(case, Plan.uniform(REFERENCE), parallel=False)
        shares: list[float] = []
        for _ in range(job["rounds"]):
            shares.append(busy(collective.seconds))
            known.append([(timed(alone), sending())])
            turns.append([])
            for step in steps:
                turns[-1].append(timed(step))
                known[-1].append((timed(alone), sending()))
    found = {"turns": turns, "known": known, "busy": shares, "plans": [plan.to_json() for plan in plans]}
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
    pairs = [
        {key: Plan.from_json(text) for key, text in zip(profiles, both, strict=True)}
        for both in zip(*(one["plans"] for one in found), strict=True)
    ]
    # Ranks leave a step together, but for their optimizers: the mean of both is the step's time.
    real = [
        [statistics.mean(both) for both in zip(*turn, strict=True)]
        for turn in zip(*(one["turns"] for one in found), strict=True)
    ]
    # It is a small difference between long times, which one measurement of a second does not tell where the machine is not quiet.
    links = replace(profiles["rank 0"].collectives[0], busy=statistics.median(found[0]["busy"]))
    paces = [
        [
            pace([one["known"][turn][at : at + 2] for one in found], list(profiles.values()), links)
            for at in range(len(pairs))
        ]
        for turn in range(len(real))
    ]
    middle = Pace(
        [statistics.median(each) for each in zip(*(one.devices for turn in paces for one in turn), strict=True)],
        statistics.median(one.network for turn in paces for one in turn),
    )
    rows: list[Row] = []
    for way in WAYS:
        foreseen = [
            [replayed(both, profiles, links, one, way) for both, one in zip(pairs, turn, strict=True)] for turn in paces
        ]
        off = medians(ratios(foreseen, real))
        mean, worst = errors(off, dict.fromkeys(off, 1.0))
        row: dict[str, Any] = {
            "case": name,
            "way": way,
            "pairs": len(pairs),
            "step_ms": 1e3 * statistics.median(step for turn in real for step in turn),
            "mean_%": mean,
            "worst_%": worst,
            "bias_%": 100 * statistics.mean(value - 1 for value in off.values()),
        }
        if way == REPLAYED:
            halves = [medians(ratios(foreseen[first::2], real[first::2])) for first in (0, 1)]
            row |= {"busy": links.busy, "pace": middle.devices, "pace of the network": middle.network}
            floor_mean, floor_worst = errors(*halves)
        rows.append(row)
    floor = {"case": name, "way": "floor: odd against even rounds", "mean_%": floor_mean, "worst_%": floor_worst}
    return [*rows, floor]


def ratios(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns what each of the left is to its counterpart."""
    return [
        [one / other for one, other in zip(ones, others, strict=True)] for ones, others in zip(left, right, strict=True)
    ]


def medians(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the median of each pair's turns, by its number."""
    return {str(at): statistics.median(each) for at, each in enumerate(zip(*turns, strict=True))}


def pace(known: Sequence[Sequence[Known]], profiles: Sequence[Profile], links: Collective) -> Pace:
    """Returns how much slower than in their profiles devices and network are, by what each rank measured before and behind a turn."""
    uniform = Plan.uniform(REFERENCE)
    devices = [
        statistics.mean(step for step, _ in one) / qsync_fx.replay(uniform, profile).seconds
        for one, profile in zip(known, profiles, strict=True)
    ]
    (bucket,) = Measured(links.seconds, RANKS).seconds([BUCKET_MIB * 2**20], RANKS)
    sent = max(statistics.mean(taken for _, taken in one) for one in known)
    return Pace(devices, sent / float(bucket))


def replayed(plans: dict[str, Plan], profiles: dict[str, Profile], links: Collective, pace: Pace, way: str) -> float:
    """Returns the seconds of a step that is replayed at a pace, in one of the ways that are compared."""
    if way == APART:
        return max(
            qsync_fx.replay(plans[key], profile).seconds * slower
            for slower, (key, profile) in zip(pace.devices, profiles.items(), strict=True)
        )
    limit = BUCKET_MIB * 2**20
    table = [(float(nbytes), pace.network * seconds) for nbytes, seconds in links.seconds]
    copies = 0.0 if way == "replayed, nothing is copied" else None
    cluster = Cluster(
        {key: Device(copies=copies, slowdown=slower) for key, slower in zip(profiles, pace.devices, strict=True)},
        Network(
            all_reduce=table, ranks=RANKS, busy=links.busy if way in (REPLAYED, "replayed, nothing is copied") else 0.0
        ),
        Buckets(limit, limit, whole_graphs=way == "no overlap"),
    )
    return qsync_fx.replay(plans, profiles, cluster=cluster).seconds


if __name__ == "__main__":
    main()
