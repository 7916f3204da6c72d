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
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from qsync_fx.predictor import ddp_buckets
from qsync_fx.predictor.cost_mapper.times import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.replayer.device_timeline import Array, local, steady

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import arguments, by_size, finish, measure

OPERATORS, BUCKETS = 10_000, 50
TARGETS = {"two classes": 1e-4, "4,096 devices": 0.02, "one operator": 1e-5, "20,000 plans": 0.05}


def iteration(ready: Array, transfer: Array, computed: Array, optimizer: Array) -> Array:
    """Return the step duration of many plans at once, without slowdown from overlap.

    QSync, Eq. (6), computes the maximum over devices for each bucket, then over buckets. Maxima
    commute: the step is as long as the slowest device alone would need, including all transfers.

    Args:
        ready: (..., devices, buckets), time at which each bucket is ready, since the device's
            start.
        transfer: (..., buckets), transfer duration of each bucket.
        computed: (..., devices), end of the backward pass.
        optimizer: (..., devices), duration of the optimizer and other work before the next step.
    """
    rest = np.cumsum(transfer[..., None, ::-1], axis=-1)[..., ::-1]
    arrived = (ready + rest).max(axis=-1)
    longest: Array = (np.maximum(arrived, computed) + optimizer).max(axis=-1)
    return longest


class Incremental:
    """Step time of a cluster whose entries change one at a time.

    Args:
        seconds: (devices, entries), duration of each entry.
        done_after: for each bucket the number of finished entries at which it is ready, ascending.
        transfer: (buckets,), transfer durations.
        optimizer: (devices,), time between the last bucket and the next step.
    """

    def __init__(
        self, seconds: Array, done_after: Sequence[int], transfer: Array, optimizer: Array
    ) -> None:
        rest = np.cumsum(transfer[::-1])[::-1]
        counts = np.asarray(done_after, dtype=int)
        ready = ready_times(seconds, counts)
        # The end of the backward pass counts as a last bucket without transfer.
        self._late = (
            np.concatenate([ready + rest, seconds.sum(axis=-1, keepdims=True)], axis=-1)
            + optimizer[:, None]
        )
        self._first = np.searchsorted(counts, np.arange(seconds.shape[-1]), side="right").tolist()
        self._latest = self._late.max(axis=-1)
        self._device, self._others = -1, -np.inf

    @property
    def seconds(self) -> float:
        """Duration of a step in seconds."""
        return float(self._latest.max())

    def changed(self, device: int, entry: int, by: float) -> float:
        """Add `by` seconds to an entry of a device and return the duration of a step."""
        late = self._late[device]
        late[self._first[entry] :] += by
        owned = self._latest[device] = np.maximum.reduce(late)
        if device != self._device:
            # A search stays with one device for many calls, and there may be thousands of others.
            others = np.delete(self._latest, device)
            self._device, self._others = device, others.max(initial=-np.inf)
        return float(max(owned, self._others))


def ready_times(seconds: Array, done_after: Sequence[int] | Array) -> Array:
    """Return the time at which each bucket is ready, (..., buckets), from the entries before it.

    Args:
        seconds: (..., entries), durations. For thousands of devices FP32 is 1.5 times as fast.
        done_after: for each bucket the number of entries before it, ascending.
    """
    edges, index = np.unique(np.concatenate([[0], done_after]), return_inverse=True)
    total = np.zeros((*seconds.shape[:-1], len(edges)))
    if len(edges) > 1:
        # reduceat sums from each edge to the next one, and from the last edge to the end.
        parts = np.add.reduceat(seconds[..., : edges[-1]], edges[:-1], axis=-1)
        np.cumsum(parts, axis=-1, dtype=np.float64, out=total[..., 1:])
    return total[..., index[1:]]


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
            ready = ready_times(seconds, done_after)
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
