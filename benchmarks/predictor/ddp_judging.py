"""Evaluation of ddp_accuracy.py: predicted against measured step times of each pair of plans.

Invariant: a prediction uses the profiles and the interleaved steps of a uniform plan, never the
steps of the evaluated plans.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import qsync_fx
from benchmarks.predictor.replay_accuracy import errors
from benchmarks.support.harness import Row
from qsync_fx import Plan, Profile
from qsync_fx.predictor.replayer.cluster import Buckets, Cluster, ClusterDevice, Network
from qsync_fx.predictor.replayer.collectives import MeasuredCollectives
from qsync_fx.profiler.links.link_measurement import least_for
from qsync_fx.profiler.profile import Collective
from qsync_fx.profiler.run_statistics import faster_half

RANKS = 2
BUCKET_MIB = 5
"""Smaller than DDP's default, so that these models have several buckets."""
REFERENCE = "bf16"
"""Uniform plan whose steps calibrate the speed of the ranks."""
NOTHING_COPIED, NO_CORE, OF_PROFILE, PROFILE_ALONE = (
    "replayed, without copies",
    "replayed, without processor use of communication",
    "replayed, processor use of communication from the profile",
    "replayed, without calibration",
)
REPLAYED, NO_OVERLAP, APART = "replayed", "no overlap", "without communication"
WAYS = (REPLAYED, OF_PROFILE, PROFILE_ALONE, NOTHING_COPIED, NO_CORE, NO_OVERLAP, APART)


@dataclass(frozen=True)
class UniformMeasurement:
    """Measurement of the uniform plan between two runs.

    Attributes:
        alone: seconds of a step without communication, concurrent with the other rank's.
        sending: seconds of the all-reduce of one bucket on idle ranks.
        together: seconds of a step of both ranks under DistributedDataParallel.
    """

    alone: float
    sending: float
    together: float


@dataclass(frozen=True)
class RankTimes:
    """Times of both ranks over some rounds, from the faster half of the samples.

    Attributes:
        alone: seconds of each rank's step of the uniform plan.
        sending, together: as in `UniformMeasurement`.
        pairs: seconds of a step of each pair of plans.
    """

    alone: list[float]
    sending: float
    together: float
    pairs: list[float]


@dataclass(frozen=True)
class Pace:
    """Speed of ranks and network relative to the profiles.

    Attributes:
        devices: slowdown of each rank's computation.
        network: slowdown of the all-reduce.
        busy: fraction of the communication time by which computation is delayed.
    """

    devices: list[float]
    network: float
    busy: float


def prediction_rows(name: str, folder: Path) -> list[Row]:
    """Return rows with the prediction errors of each predictor."""
    results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    profiles = {
        f"rank {rank}": Profile.load(folder / f"profile-{rank}.json", any_machine=True)
        for rank in range(RANKS)
    }
    pairs = [
        {key: Plan.from_json(text) for key, text in zip(profiles, both, strict=True)}
        for both in zip(*(result["plans"] for result in results), strict=True)
    ]
    rounds = range(len(results[0]["turns"]))
    observed = times_of_rounds(results, rounds)
    middle = pace(observed, profiles)
    rows: list[Row] = []
    for variant in WAYS:
        off = [value - 1 for value in ratios(pairs, profiles, observed, middle, variant)]
        row: dict[str, Any] = {
            "case": name,
            "method": variant,
            "pairs": len(pairs),
            "step_ms": 1e3 * statistics.median(observed.pairs),
            "mean_%": 100 * statistics.mean(map(abs, off)),
            "worst_%": 100 * max(map(abs, off)),
            "bias_%": 100 * statistics.mean(off),
        }
        if variant == REPLAYED:
            row |= {
                "busy": middle.busy,
                "pace": middle.devices,
                "pace of the network": middle.network,
            }
            row |= {"each_%": [round(100 * result, 2) for result in off]}
        if variant == PROFILE_ALONE:
            each = [result.collectives[0] for result in profiles.values()]
            row |= {
                "busy": each[0].busy,
                "copies": [result.copies for result in each],
                "pace": [result.slowdown for result in each],
            }
        rows.append(row)
    halves = [times_of_rounds(results, rounds[first::2]) for first in (0, 1)]
    apart = [
        dict(enumerate(ratios(pairs, profiles, half, pace(half, profiles), REPLAYED)))
        for half in halves
    ]
    mean, worst = errors(
        *({str(index): value for index, value in result.items()} for result in apart)
    )
    floor = {
        "case": name,
        "method": "floor: odd against even rounds",
        "mean_%": mean,
        "worst_%": worst,
    }
    return [*rows, floor]


def times_of_rounds(results: Sequence[Mapping[str, Any]], rounds: Sequence[int]) -> RankTimes:
    """Return the times of some rounds."""
    steps = [
        [UniformMeasurement(*step) for index in rounds for step in rank["known"][index]]
        for rank in results
    ]
    turns = [[rank["turns"][index] for index in rounds] for rank in results]
    # Ranks end a step together, except for their optimizers: the mean of both is the step time.
    pairs = [
        [statistics.mean(both) for both in zip(*ranks, strict=True)]
        for ranks in zip(*turns, strict=True)
    ]
    return RankTimes(
        [faster_half([step.alone for step in rank]) for rank in steps],
        faster_half([max(step.sending for step in both) for both in zip(*steps, strict=True)]),
        faster_half(
            [statistics.mean(step.together for step in both) for both in zip(*steps, strict=True)]
        ),
        [faster_half(each) for each in zip(*pairs, strict=True)],
    )


def ratios(
    pairs: Sequence[Mapping[str, Plan]],
    profiles: Mapping[str, Profile],
    real: RankTimes,
    pace: Pace,
    variant: str,
) -> list[float]:
    """Return the predicted step time of each pair, divided by the measured one."""
    return [
        replayed(plans, profiles, pace, variant) / seconds
        for plans, seconds in zip(pairs, real.pairs, strict=True)
    ]


def links(profiles: Mapping[str, Profile]) -> Collective:
    return next(iter(profiles.values())).collectives[0]


def pace(real: RankTimes, profiles: Mapping[str, Profile]) -> Pace:
    """Return the slowdown of devices and network and the `busy` fraction, from the uniform plan."""
    uniform = Plan.uniform(REFERENCE)
    devices = [
        alone / qsync_fx.replay(uniform, profile).seconds
        for alone, profile in zip(real.alone, profiles.values(), strict=True)
    ]
    (bucket,) = MeasuredCollectives(links(profiles).seconds, RANKS).seconds(
        [BUCKET_MIB * 2**20], RANKS
    )
    result = Pace(devices, real.sending / float(bucket), 0.0)
    both = dict.fromkeys(profiles, uniform)
    busy = least_for(
        lambda busy: replayed(both, profiles, replace(result, busy=busy), REPLAYED), real.together
    )
    return replace(result, busy=busy)


def replayed(
    plans: Mapping[str, Plan], profiles: Mapping[str, Profile], pace: Pace, variant: str
) -> float:
    """Return the predicted seconds of a step by one of the predictors in `WAYS`."""
    if variant == APART:
        return max(
            qsync_fx.replay(plans[key], profile).seconds * slower
            for slower, (key, profile) in zip(pace.devices, profiles.items(), strict=True)
        )
    if variant == PROFILE_ALONE:
        pace = Pace(
            [item.collectives[0].slowdown for item in profiles.values()], 1.0, links(profiles).busy
        )
    limit = BUCKET_MIB * 2**20
    measured = links(profiles)
    busy = {NO_CORE: 0.0, NO_OVERLAP: 0.0, OF_PROFILE: measured.busy}.get(variant, pace.busy)
    copies = 0.0 if variant == NOTHING_COPIED else None
    cluster = Cluster(
        {
            key: ClusterDevice(
                copies=copies, slowdown=slower, delay=pace.network * measured.buffers
            )
            for key, slower in zip(profiles, pace.devices, strict=True)
        },
        Network(
            all_reduce=[
                (float(nbytes), pace.network * seconds) for nbytes, seconds in measured.seconds
            ],
            ranks=RANKS,
            busy=busy,
        ),
        Buckets(limit, limit, whole_graphs=variant == NO_OVERLAP),
    )
    return qsync_fx.replay(dict(plans), dict(profiles), cluster=cluster).seconds
