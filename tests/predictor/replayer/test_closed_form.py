"""Closed forms of the replayer, compared with an event simulation of steps and of runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose
from simulation import Device, simulated

from benchmarks.predictor.replay_speed import Incremental, iteration, ready_times
from qsync_fx.predictor.cost_mapper.times import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.replayer.device_timeline import (
    DeviceStep,
    Local,
    local,
    steady,
    step,
)

SECONDS = st.floats(0, 10).map(lambda value: round(value, 3))


@dataclass(frozen=True)
class Fleet:
    """Devices with the same parameters and buckets, and with different times."""

    schedules: list[Schedule]
    buckets: list[list[int]]
    slowdowns: list[float]
    launches: list[float]
    extra: list[dict[int, Entry]]
    neighbours: list[dict[int, Entry]]
    transfers: list[float]
    begins: list[float]

    def locals(self) -> list[Local]:
        arguments = zip(
            self.schedules, self.slowdowns, self.launches, self.extra, self.neighbours, strict=True
        )
        return [
            local(
                schedule,
                self.buckets,
                slowdown=slowdown,
                launch=launch,
                extra=extra,
                neighbours=neighbours,
            )
            for schedule, slowdown, launch, extra, neighbours in arguments
        ]

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        timelines = self.locals()
        ready, computed, optimizer = (
            np.stack([timeline.ready for timeline in timelines]),
            np.array([timeline.computed for timeline in timelines]),
            np.array([timeline.optimizer for timeline in timelines]),
        )
        return ready, computed, optimizer, np.array(self.transfers)

    def devices(self, begins: list[float]) -> list[Device]:
        """Return the simulation's devices, computed from the schedules without the tested code."""
        made = []
        for index, schedule in enumerate(self.schedules):
            entries = [*schedule.forward, *schedule.backward]
            done_after, most = [], 0
            for bucket in self.buckets:
                names = [schedule.parameters[parameter].path for parameter in bucket]
                ready = [
                    len(schedule.forward) + schedule.ready[name] + 1
                    for name in names
                    if name in schedule.ready
                ]
                most = max([most, len(schedule.forward), *ready])
                done_after.append(most)
            seconds: list[float] = []
            shifted = [0] * len(self.buckets)
            for position in range(len(entries) + 1):
                for bucket, after in enumerate(done_after):
                    if after == position:
                        if bucket in self.extra[index]:
                            seconds.append(self.extra[index][bucket].seconds)
                        shifted[bucket] = len(seconds)
                        if bucket in self.neighbours[index]:
                            seconds.append(self.neighbours[index][bucket].seconds)
                if position < len(entries):
                    seconds.append(entries[position].seconds)
            seconds = [value * self.slowdowns[index] for value in seconds]
            handed_over = [(n + 1) * self.launches[index] for n in range(len(seconds))]
            optimizer = schedule.optimizer * self.slowdowns[index]
            made.append(Device(seconds, handed_over, shifted, optimizer, begins[index]))
        return made


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    count, devices = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    forward, backward = draw(st.integers(0, 4)), draw(st.integers(1, 8))
    parameters = tuple(Parameter(f"p{index}", 1) for index in range(count))
    ready = {
        f"p{index}": draw(st.integers(0, backward - 1))
        for index in range(count)
        if draw(st.integers(0, 9))
    }
    order = draw(st.permutations(range(count)))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    buckets = [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, count], strict=True) if a < b]

    def entries(part: Part, number: int) -> tuple[Entry, ...]:
        return tuple(Entry(f"{part}{index}", part, draw(SECONDS)) for index in range(number))

    def a_device(kind: st.SearchStrategy[float]) -> list[float]:
        return [draw(kind) for _ in range(devices)]

    def at_buckets() -> list[dict[int, Entry]]:
        return [
            {
                index: Entry("", Part.OUTSIDE, draw(SECONDS))
                for index in range(len(buckets))
                if draw(st.booleans())
            }
            for _ in range(devices)
        ]

    return Fleet(
        [
            Schedule(
                entries(Part.FORWARD, forward),
                entries(Part.BACKWARD, backward),
                draw(SECONDS),
                parameters,
                ready,
            )
            for _ in range(devices)
        ],
        buckets,
        a_device(st.sampled_from([1.0, 1.3])),
        a_device(st.sampled_from([0.0, 0.0, 0.5, 4.0])),
        at_buckets(),
        at_buckets(),
        [draw(SECONDS) for _ in buckets],
        a_device(SECONDS),
    )


def equal(actual: DeviceStep, wanted: tuple[list[float], list[float], list[float]]) -> None:
    for ours, simulated_ones in zip(
        (actual.sent, actual.arrived, actual.done), wanted, strict=True
    ):
        assert_allclose(ours, simulated_ones, rtol=1e-9, atol=1e-9)


@settings(max_examples=150, deadline=None)
@given(fleets())
def test_a_step_is_that_of_the_simulation(fleet: Fleet) -> None:
    result = step(*fleet.arrays(), np.array(fleet.begins))
    equal(result, simulated(fleet.devices(fleet.begins), fleet.transfers))


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_entries_end_as_in_the_simulation(fleet: Fleet) -> None:
    devices = fleet.devices(fleet.begins)
    simulated(devices, fleet.transfers)
    for timeline, device, begin in zip(fleet.locals(), devices, fleet.begins, strict=True):
        assert_allclose(timeline.ends + begin, device.ended, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_run_converges_to_the_steady_step(fleet: Fleet) -> None:
    """The reference is the mean of the last 20 simulated steps, after convergence."""
    if not fleet.buckets:
        return
    begins, every = [0.0] * len(fleet.schedules), []
    # A slightly slower device falls behind a little in each step, until the others wait for it.
    for _ in range(100):
        before = begins
        for _ in range(20):
            _, _, done = simulated(fleet.devices(begins), fleet.transfers)
            every.append(min(done))
            begins = [end - min(done) for end in done]
        if np.allclose(before, begins, rtol=0, atol=1e-9):
            break
    result = steady(*fleet.arrays())
    ready, computed, optimizer, transfer = fleet.arrays()
    assert_allclose(
        iteration(ready, transfer, computed, optimizer), result.seconds, rtol=1e-6, atol=1e-6
    )
    assert_allclose(np.mean(every[-20:]), result.seconds, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(fleets(), min_size=2, max_size=4))
def test_batched_replay_equals_single_replays(fleets: list[Fleet]) -> None:
    shape = [(len(fleet.schedules), len(fleet.buckets)) for fleet in fleets]
    same_shape = [fleet for fleet, its in zip(fleets, shape, strict=True) if its == shape[0]]
    begins = [np.array(fleet.begins) for fleet in same_shape]
    every = [fleet.arrays() for fleet in same_shape]
    together = step(
        *(np.stack(parts) for parts in zip(*every, strict=True)),
        np.stack(begins),
    )
    for index, (arrays, begun) in enumerate(zip(every, begins, strict=True)):
        alone = step(*arrays, begun)
        for name in ("ready", "sent", "arrived", "computed", "done"):
            assert_allclose(getattr(together, name)[index], getattr(alone, name), rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_changes_add_up(data: st.DataObject) -> None:
    devices, entries, buckets = (data.draw(st.integers(1, most)) for most in (4, 12, 5))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    seconds, transfer, optimizer = (
        random.random((devices, entries)),
        random.random(buckets),
        random.random(devices),
    )
    done_after = np.sort(random.integers(0, entries + 1, buckets))
    fast = Incremental(seconds.copy(), done_after.tolist(), transfer, optimizer)
    for _ in range(10):
        device, entry, by = (
            random.integers(devices),
            random.integers(entries),
            random.random() - 0.3,
        )
        seconds[device, entry] += by
        expected = iteration(ready_times(seconds, done_after), transfer, seconds.sum(-1), optimizer)
        assert_allclose(fast.changed(device, entry, by), expected, rtol=1e-9)
        assert_allclose(fast.seconds, expected, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_sums_up_to_buckets(seed: int) -> None:
    random = np.random.default_rng(seed)
    seconds = random.random((2, 3, random.integers(0, 9)))
    done_after = np.sort(random.integers(0, seconds.shape[-1] + 1, random.integers(0, 5)))
    assert_allclose(
        ready_times(seconds, done_after),
        np.stack([seconds[..., :done].sum(-1) for done in done_after], -1)
        if len(done_after)
        else np.zeros((2, 3, 0)),
        rtol=1e-12,
    )


def test_equation_6_by_hand() -> None:
    """The second of three buckets is late on the slow device, and the third waits for it."""
    ready = np.array([[1.0, 2.0, 3.0], [1.0, 5.0, 6.0]])
    result = step(
        ready, np.array([3.0, 6.0]), np.array([0.5, 0.5]), np.array([1.0, 3.0, 1.0]), np.zeros(2)
    )
    assert result.sent.tolist() == [1, 5, 8]
    assert result.arrived.tolist() == [2, 8, 9]
    assert result.seconds == 9.5
