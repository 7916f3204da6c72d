"""What two ranks measured, judged: each pair of plans replayed at the pace of its turn, against what its steps took.

Invariant: a step is foreseen from the ranks' profiles, and from what is known of the minute it was measured in; never from the step itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import qsync_fx
from benchmarks.predictor.replay_accuracy import errors
from benchmarks.support.harness import Row
from qsync_fx import Plan, Profile
from qsync_fx.predictor.replay.cluster import Cluster
from qsync_fx.predictor.replay.cluster_parts import Buckets, Device, Network
from qsync_fx.predictor.replay.collectives import Measured
from qsync_fx.profiling.profile import Collective

RANKS = 2
BUCKET_MIB = 5
"""Smaller than DDP's own, so that models of these sizes send several."""
REFERENCE = "bf16"
"""The uniform plan whose steps say how fast a rank is."""
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
