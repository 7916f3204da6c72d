"""Timelines: their totals, their text, and their Perfetto files."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from qsync_fx.errors import ProfileError, QSyncError
from qsync_fx.predictor.cost_mapper.times import Entry, Parameter, Part, Schedule
from qsync_fx.predictor.replayer.cluster import (
    Buckets,
    Cluster,
    ClusterDevice,
    Compression,
    Network,
)
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.timeline.timeline import Timeline

LAYERS = 6


def schedule(seconds: float, seed: int = 0) -> Schedule:
    """Return a schedule of layers, each with a weight of 1 MiB, a cast before every second layer,
    and framework overhead.
    """
    draw = random.Random(seed)
    forward, backward = [Entry("", Part.OUTSIDE, seconds / 10)], []
    for index in range(LAYERS):
        if index % 2:
            forward.append(Entry(f"{index}/linear", Part.CAST, seconds / 5))
        forward.append(Entry(f"{index}/linear", Part.FORWARD, seconds * draw.uniform(0.5, 1.5)))
    for index in range(LAYERS)[::-1]:
        backward.append(
            Entry(f"{index}/linear", Part.BACKWARD, 2 * seconds * draw.uniform(0.5, 1.5))
        )
    parameters = tuple(Parameter(f"{index}.weight", 2**18) for index in range(LAYERS))
    ready = {parameter.path: LAYERS - 1 - index for index, parameter in enumerate(parameters)}
    return Schedule(tuple(forward), tuple(backward), seconds, parameters, ready)


FAST, SLOW = schedule(1e-3), schedule(2e-3, seed=1)
CLUSTER = Cluster(
    {
        "fast": ClusterDevice(count=3, batch=32, memory=1e9),
        "slow": ClusterDevice(batch=16, delay=1e-4),
    },
    Network(bandwidth=1e9, latency=1e-5),
    Buckets(2**20, 2**21),
)


def timeline(
    schedules: Mapping[str, Schedule] | None = None, cluster: Cluster = CLUSTER, **more: Any
) -> Timeline:
    return Timeline(simulate(schedules or {"fast": FAST, "slow": SLOW}, cluster, **more))


def test_notebook_representation_has_one_line() -> None:
    assert (
        repr(timeline())
        == f"Timeline({1e3 * timeline().seconds:.4g} ms per step on 3 fast, 1 slow)"
    )


def test_timeline_of_one_device_equals_its_schedule() -> None:
    alone = timeline({"here": FAST}, Cluster({"here": ClusterDevice()}))
    assert alone.seconds == pytest.approx(FAST.seconds)
    assert alone.waiting == alone.sending == {"here": 0}
    assert alone.throughput is None
    assert not alone.peak_bytes
    assert alone.played.buckets == ()


def test_the_fast_wait_for_the_slow() -> None:
    fleet = timeline()
    assert fleet.seconds > SLOW.seconds > FAST.seconds
    assert fleet.waiting["fast"] > FAST.seconds / 2
    assert fleet.waiting["slow"] == 0
    assert fleet.sending["slow"] > 0
    assert [len(bucket.parameters) for bucket in fleet.played.buckets] == [1, 2, 2, 1]
    assert fleet.played.buckets[0].parameters == ("5.weight",)
    assert fleet.throughput == pytest.approx((3 * 32 + 16) / fleet.seconds)


@pytest.mark.parametrize("copies", [None, 2e-11])
@pytest.mark.parametrize("network", [{}, {"busy": 0.5}])
def test_a_step_adds_up_on_each_device(network: dict[str, float], copies: float | None) -> None:
    devices = {name: replace(device, copies=copies) for name, device in CLUSTER.devices.items()}
    cluster = Cluster(devices, Network(1e9, 1e-5, **network), CLUSTER.buckets)  # type: ignore[arg-type]
    fleet = timeline(cluster=cluster)
    for name, pieces in fleet.computing.items():
        total = sum(piece.end - piece.begin for piece in pieces) + cluster.devices[name].delay
        assert total == pytest.approx(fleet.seconds)
        assert all(a.end == pytest.approx(b.begin) for a, b in pairwise(pieces))
    by_operator = sum(
        operator.seconds for operator in fleet.by_operator() if operator.device == "slow"
    )
    into_buckets = (copies or 0.0) * sum(bucket.nbytes for bucket in fleet.played.buckets)
    travelled = (fleet.played.step.arrived - fleet.played.step.sent).sum()
    delay = network.get("busy", 0.0) * float(travelled)
    assert by_operator == pytest.approx(SLOW.seconds - SLOW.optimizer + into_buckets + delay)


def test_communication_delays_computation() -> None:
    """A device that is busy whenever buckets travel does not overlap communication with
    computation.
    """
    devices = {"here": ClusterDevice(count=2)}
    steps = {
        busy: timeline(
            {"here": SLOW}, Cluster(devices, Network(1e9, 1e-5, busy=busy), CLUSTER.buckets)
        ).seconds
        for busy in (0.0, 0.5, 1.0)
    }
    fleet = timeline({"here": SLOW}, Cluster(devices, Network(1e9, 1e-5), CLUSTER.buckets))
    travels = float((fleet.played.step.arrived - fleet.played.step.sent).sum())
    assert steps[0.0] < steps[0.5] < steps[1.0]
    assert steps[1.0] == pytest.approx(SLOW.seconds + travels)


def test_gradients_are_copied_into_buckets_and_out_of_them() -> None:
    devices = {"fast": ClusterDevice(count=3), "slow": ClusterDevice(slowdown=2.0, copies=1e-10)}
    without = timeline(
        cluster=Cluster(
            devices | {"slow": ClusterDevice(slowdown=2.0)}, CLUSTER.network, CLUSTER.buckets
        )
    )
    fleet = timeline(cluster=Cluster(devices, CLUSTER.network, CLUSTER.buckets))
    nbytes = sum(bucket.nbytes for bucket in fleet.played.buckets)
    # The last bucket is ready after all copies. In the meantime the slow device waits for no other
    # bucket.
    assert fleet.seconds - without.seconds == pytest.approx(2 * 2 * nbytes * 1e-10, rel=1e-6)
    assert fleet.played.after("fast") == FAST.optimizer
    alone = Cluster({"here": ClusterDevice(copies=1e-10)})
    assert timeline({"here": SLOW}, alone).seconds == pytest.approx(SLOW.seconds)


def test_operators_come_with_their_parts() -> None:
    fleet = timeline().by_operator()
    assert fleet[0].device == "slow" and len(fleet) == 2 * (LAYERS + 1)
    assert all(a.seconds >= b.seconds for a, b in pairwise(fleet))
    operator = next(
        entry for entry in fleet if (entry.device, entry.operator) == ("fast", "3/linear")
    )
    assert operator.casts == pytest.approx(2e-4)
    assert operator.forward == next(
        e.seconds for e in FAST.forward if (e.operator, e.part) == ("3/linear", Part.FORWARD)
    )
    assert next(entry for entry in fleet if entry.operator == "").other == pytest.approx(2e-4)


def test_compression_sends_fewer_bytes_and_costs_time() -> None:
    plain, packed = timeline(), timeline(compression=[None, *[Compression(0.25, 1e-5, 1e-12)] * 3])
    assert [bucket.travelling / bucket.nbytes for bucket in packed.played.buckets] == [
        1,
        0.25,
        0.25,
        0.25,
    ]
    extra = 3 * 1e-5 + 5 * 2**20 * 1e-12
    other = {entry.device: entry.other for entry in packed.by_operator() if entry.operator == ""}
    assert other == pytest.approx({"fast": 1e-4 + extra, "slow": 2e-4 + extra})
    everywhere = Cluster(CLUSTER.devices, CLUSTER.network, CLUSTER.buckets, Compression(0.25))
    assert timeline(cluster=everywhere).seconds < plain.seconds
    with pytest.raises(ProfileError, match="compression of 1 buckets for 4"):
        timeline(compression=[None])


def test_a_straggler_and_a_slow_host() -> None:
    devices = {"here": ClusterDevice(slowdown=1.5)}
    assert timeline({"here": FAST}, Cluster(devices)).seconds == pytest.approx(1.5 * FAST.seconds)
    entries = len(FAST.forward) + len(FAST.backward)
    bound = timeline({"here": FAST}, Cluster({"here": ClusterDevice(launch=1.0)}))
    assert bound.seconds == pytest.approx(entries + FAST.backward[-1].seconds + FAST.optimizer)


def test_schedules_must_be_of_one_model_and_of_the_cluster() -> None:
    other = Schedule(
        SLOW.forward,
        SLOW.backward,
        0,
        (*SLOW.parameters[:-1], Parameter("5.weight", 7)),
        SLOW.ready,
    )
    with pytest.raises(ProfileError, match="'fast' and 'slow' train different parameters: '5"):
        timeline({"fast": FAST, "slow": other})
    with pytest.raises(ProfileError, match="the cluster has no devices 'slwo'") as caught:
        timeline({"fast": FAST, "slwo": SLOW})
    assert "did you mean 'slow'" in str(caught.value)
    with pytest.raises(ProfileError, match="there is none for the devices 'slow'"):
        timeline({"fast": FAST})


def test_it_prints() -> None:
    fleet = Timeline(timeline().played, {"fast": 2_000_000_000, "slow": 10_000_000})
    text = str(fleet)
    first, *_ = text.splitlines()
    assert f"{fleet.seconds * 1e3:.4g} ms per step" in first
    assert "6.29MB of gradients in 4 buckets" in first
    row = next(line for line in text.splitlines() if line.strip().startswith("fast"))
    assert f"{fleet.waiting['fast'] * 1e3:.4g} ms" in row
    assert "2GB of 1GB, exceeded" in row
    assert "3/linear" in text


def test_perfetto_file_has_the_required_fields(tmp_path: Path) -> None:
    """Trace Event Format: complete events with microseconds, and metadata that names tracks."""
    path, fleet = tmp_path / "timeline.json", timeline()
    fleet.save_perfetto(path)
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        assert (
            {"ph", "name", "pid", "tid"} <= event.keys()
            and isinstance(event["pid"], int)
            and event["pid"] > 0
        )
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (pid, tid): name
        for pid in (1, 2)
        for tid, name in ((1, "computation"), (2, "communication"))
    }
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["fast (3 devices)", "slow"]
    assert tracks.keys() == names.keys()
    for slices in tracks.values():
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    waited = sum(event["dur"] for event in tracks[1, 1] if event["cat"] == "waiting")
    assert waited == pytest.approx(fleet.waiting["fast"] * 1e6)


def test_unwritable_perfetto_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(QSyncError, match="cannot be written"):
        timeline().save_perfetto(tmp_path / "none" / "timeline.json")
