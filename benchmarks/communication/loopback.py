"""Error of step times predicted for each gradient codec, for two ranks over loopback.
Loopback is not bandwidth-bound. Both ranks concurrently measure a profile with links. Then the
model is trained in FP32 with DistributedDataParallel's own reduction and with each codec
(`compress`), interleaved. Columns: "step_ms" is the measured step, and the next two columns are the
step predicted by `qsync comm predict` from the profiles and its signed error in percent. "faster"
and the next column are the measured and the predicted speedup over uncompressed gradients. Row
"verdict": "chosen" is the codec predicted to be fastest, "regret" the relative excess of its
measured step over the fastest one's, and "floor" the median difference between odd and even rounds.
The two ranks need two idle cores.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx import Plan
from qsync_fx.predictor.cost_mapper import CostMapper
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from qsync_fx.profiler.profile import PROFILE
from qsync_fx.profiler.run_statistics import faster_half
from qsync_fx.timeline.device_profiles import load_device_profiles
from qsync_fx.timeline.replay_plans import NONE, best, paying, rates

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.communication.ranks import found_by, requested_job
from benchmarks.predictor.ddp_accuracy import Called, timed, training as planned
from benchmarks.predictor.replay_accuracy import CASES, QUICK, Case
from benchmarks.support.harness import Row, arguments, by_size, finish, selected

RANKS = 2
CODECS = ("fp16", "qsgd8", "qsgd4", "1bit*")
FORMAT = "fp32"


def main() -> None:
    if (job := requested_job()) is not None:
        rank(job)
        return
    options = arguments(
        __doc__,
        only={"help": "one case: bert, resnet, vgg"},
        rounds={"type": int, "default": 15, "help": "turns (%(default)s)"},
    )
    rows: list[Row] = []
    for name in selected(options, by_size(options.quick, QUICK, CASES)):
        job = {
            "case": name,
            "quick": options.quick,
            "rounds": by_size(options.quick, 2, options.rounds),
        }
        rows += prediction_rows(name, found_by(__file__, job, RANKS, None, seconds=3600))
    finish(options, rows, by="case")


def rank(job: dict[str, Any]) -> None:
    """Run one rank: measure a profile, train with all codecs interleaved, and gather the times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    case = (by_size(job["quick"], QUICK, CASES))[job["case"]]()
    case = replace(case, model=Called(case.model))
    profile = qsync_fx.measure(
        case.model,
        case.step,
        [case.batch],
        [FORMAT],
        optimizer=case.optimizer,
        sensitivity=None,
        progress=False,
    )
    steps = {codec: training(case, codec) for codec in (NONE, *CODECS)}
    turns: dict[str, list[float]] = {codec: [] for codec in steps}
    for _ in range(job["rounds"]):
        for codec, step in steps.items():
            turns[codec].append(timed(step))
    first = dist.get_rank() == 0
    results: list[Any] = [None] * RANKS
    dist.gather_object({"profile": profile.to_json(), "turns": turns}, results if first else None)
    if first:
        Path(job["path"]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def training(case: Case, codec: str) -> Callable[[], None]:
    """Return a step of a copy of the model whose gradients use a codec."""

    def sends(wrapped: DistributedDataParallel) -> None:
        if codec != NONE:
            qsync_fx.distributed.compress(wrapped, codec, check_every=0)

    return planned(case, Plan.uniform(FORMAT), bucket_mib=None, sends=sends)


def prediction_rows(name: str, results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows with the predicted and measured step of each codec."""
    profiles = {
        f"rank {rank_index}": PROFILE.decode(result["profile"])
        for rank_index, result in enumerate(results)
    }
    fleet, speeds = load_device_profiles(
        profiles, Cluster({device: ClusterDevice() for device in profiles})
    )
    plan = Plan.uniform(FORMAT)
    schedules = {
        device: CostMapper(profile.graph, profile.times(), plan).schedule()
        for device, profile in profiles.items()
    }
    without, candidates = paying(schedules, fleet, CODECS, rates(fleet, speeds))
    turns = [result["turns"] for result in results]
    took = {codec: seconds(turns, codec) for codec in turns[0]}
    halves = [{codec: seconds(turns, codec, first) for codec in took} for first in (0, 1)]
    floor = statistics.median(abs(halves[0][codec] / halves[1][codec] - 1) for codec in took)
    chosen, quickest = best(without, candidates).codec, min(took, key=lambda codec: took[codec])
    rows: list[Row] = [
        {
            "case": name,
            "gradients": result.codec,
            "step_ms": 1e3 * took[result.codec],
            "predicted_ms": 1e3 * result.seconds,
            "error_%": 100 * (result.seconds / took[result.codec] - 1),
            "faster": took[NONE] / took[result.codec],
            "predicted_faster": without.seconds / result.seconds,
            "hidden": result.hidden,
        }
        for result in (without, *candidates)
    ]
    verdict = {
        "chosen": chosen,
        "quickest": quickest,
        "regret": took[chosen] / took[quickest] - 1,
        "floor": floor,
    }
    return [*rows, {"case": name, "gradients": "verdict", **verdict}]


def seconds(
    results: Sequence[Mapping[str, Sequence[float]]], codec: str, first: int | None = None
) -> float:
    """Return the seconds of a step of both ranks, of every second round from `first` if given."""
    both = [statistics.mean(turn) for turn in zip(*(rank[codec] for rank in results), strict=True)]
    return faster_half(both if first is None else both[first::2])


if __name__ == "__main__":
    main()
