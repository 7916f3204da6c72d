"""Time to replay training steps on one core, with 10,000 operators and 50 buckets.
Cases: "two classes" simulates a step of two devices from all operator times; "4,096 devices" does
the same in FP32 with separate times for each device; "one operator" updates the step after a change
of one operator of one device; "20,000 plans" simulates steps of two devices from the ready times of
their buckets; "two schedules" simulates a step of two devices from their schedules. Runs are
interleaved. Columns: "seconds" is the median CPU time of a call, "wall" the median wall time, and
"target" the limit for "seconds".
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qsync_fx.predictor import ddp_buckets
from qsync_fx.predictor.replayer.cluster_step import Incremental, whole
from qsync_fx.predictor.replayer.device_timeline import Array, iteration, local, steady
from qsync_fx.predictor.times import Entry, Parameter, Part, Schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import arguments, by_size, finish, measure

OPERATORS, BUCKETS = 10_000, 50
TARGETS = {"two classes": 1e-4, "4,096 devices": 0.02, "one operator": 1e-5, "20,000 plans": 0.05}


def main() -> None:
    options = arguments(__doc__)
    random = np.random.default_rng(0)
    done_after = np.sort(random.integers(OPERATORS // 3, OPERATORS, BUCKETS))
    done_after[-1] = OPERATORS
    transfer = random.random(BUCKETS) * 1e-3

    def replays(devices: int, dtype: type[np.floating]) -> Callable[[], Array]:
        seconds = (random.random((devices, OPERATORS), dtype=np.float32) * 1e-4).astype(dtype)
        optimizer = random.random(devices) * 1e-2

        def run() -> Array:
            ready = whole(seconds, done_after)
            return iteration(ready, transfer, ready[..., -1], optimizer)

        return run

    changing = Incremental(
        random.random((2, OPERATORS)), done_after.tolist(), transfer, np.full(2, 0.01)
    )
    entries = random.integers(0, OPERATORS, 1024).tolist()

    def change() -> None:
        for entry in entries:
            changing.changed(0, entry, 1e-6)

    plans = np.sort(random.random((20_000, 2, BUCKETS)), axis=-1)
    schedule = a_schedule(random)
    buckets = ddp_buckets([parameter.numel for parameter in schedule.parameters])

    def from_schedules() -> None:
        timelines = [local(schedule, buckets), local(schedule, buckets, slowdown=1.1)]
        steady(
            np.stack([timeline.ready for timeline in timelines]),
            np.array([timeline.computed for timeline in timelines]),
            np.array([timeline.optimizer for timeline in timelines]),
            np.full(len(buckets), 1e-3),
        )

    cases = {
        "two classes": replays(2, np.float64),
        "4,096 devices": replays(4096, np.float32),
        "one operator": change,
        "20,000 plans": lambda: iteration(plans, transfer, plans[..., -1], np.full(2, 0.01)),
        "two schedules": from_schedules,
    }
    repeats = by_size(options.quick, 3, 21)
    wall, core = measure(cases, repeats), measure(cases, repeats, clock=time.process_time)
    calls = {"one operator": len(entries)}
    rows = [
        {
            "case": name,
            "seconds": core.median(name) / calls.get(name, 1),
            "wall": wall.median(name) / calls.get(name, 1),
            "target": TARGETS.get(name),
        }
        for name in cases
    ]
    finish(options, rows)


def a_schedule(random: np.random.Generator) -> Schedule:
    half = OPERATORS // 2
    seconds = random.random(OPERATORS) * 1e-4
    parameters = tuple(Parameter(f"layers.{index}.weight", 700_000) for index in range(half // 10))
    return Schedule(
        tuple(
            Entry(f"layers.{index}/linear", Part.FORWARD, float(seconds[index]))
            for index in range(half)
        ),
        tuple(
            Entry(f"layers.{index}/linear", Part.BACKWARD, float(seconds[half + index]))
            for index in range(half)[::-1]
        ),
        0.01,
        parameters,
        {parameter.path: half - 1 - 10 * index for index, parameter in enumerate(parameters)},
    )


if __name__ == "__main__":
    main()
