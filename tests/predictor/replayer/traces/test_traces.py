"""Schedules that are read from traces of torch's profilers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qsync_fx.errors import ProfileError
from qsync_fx.predictor import ddp_buckets
from qsync_fx.predictor.cost_mapper.times import Part
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice, Network
from qsync_fx.predictor.replayer.trace_schedules import (
    TracedSchedule,
    kineto,
    played_traces,
    read_steps,
)
from tests.support import tiers
from tests.support.distributed import traced_rank
from tests.support.planning.trace_files import device_trace, edited


@pytest.fixture(scope="module")
def step(folder: Path) -> TracedSchedule:
    steps = read_steps(folder / "kineto-0.json", folder / "execution-0.json")
    assert len(steps) == traced_rank.STEPS
    return steps[1]


def test_forward_and_backward_share_the_operator_name(step: TracedSchedule) -> None:
    forward = [entry.operator for entry in step.schedule.forward if entry.part is Part.FORWARD]
    linears, relus = (
        [f"aten::{kind}#{index}" for index in range(count)]
        for kind, count in (("linear", 4), ("relu", 2))
    )
    assert [name for name in forward if "linear" in name] == linears
    backward = [entry.operator for entry in step.schedule.backward if entry.part is Part.BACKWARD]
    differentiated = [
        name for name in dict.fromkeys(backward) if "linear" in name or "relu" in name
    ]
    order = [linears[3], linears[2], relus[1], linears[1], relus[0], linears[0]]
    assert differentiated == order
    assert {entry.part for entry in step.schedule.forward} == {Part.FORWARD, Part.OUTSIDE}


def test_schedule_duration_equals_the_step(folder: Path) -> None:
    traced = json.loads((folder / "kineto-0.json").read_text())["traceEvents"]
    for recorded in read_steps(folder / "kineto-0.json"):
        (mark,) = (
            event for event in traced if event.get("name") == recorded.name and event["ph"] == "X"
        )
        assert recorded.seconds == pytest.approx(mark["dur"] / 1e6)
        schedule = recorded.schedule
        waited = recorded.seconds - schedule.seconds
        assert 0 <= waited <= sum(recorded.sent) + 1e-6
        adamw = next(
            event
            for event in traced
            if str(event.get("name")).startswith("Optimizer.step#")
            and mark["ts"] < event["ts"] < mark["ts"] + mark["dur"]
        )
        assert schedule.optimizer >= adamw["dur"] / 1e6 - 1e-6


def test_all_reduces_that_start_in_another_order_keep_their_sizes(
    folder: Path, tmp_path: Path
) -> None:
    trace = json.loads((folder / "kineto-0.json").read_text())
    events = [event for event in trace["traceEvents"] if event.get("name") == "gloo:all_reduce"]
    events.sort(key=lambda event: event["ts"])
    first, second = events[-3:-1]
    first["ts"], second["ts"] = second["ts"], first["ts"]
    path = tmp_path / "kineto-0.json"
    path.write_text(json.dumps(trace))
    expected, actual = (
        [bucket.numel for bucket in read_steps(source)[-1].schedule.parameters]
        for source in (folder / "kineto-0.json", path)
    )
    assert actual == expected and len(set(actual)) == len(actual)


@pytest.mark.parametrize("with_execution", [True, False])
def test_buckets_equal_ddp(folder: Path, with_execution: bool) -> None:
    """Both traces contain the sizes of buckets."""
    numels = [parameter.numel() for parameter in traced_rank.model().parameters()]
    arrival = json.loads((folder / "arrival.json").read_text())
    wanted = [
        sum(numels[index] for index in bucket)
        for bucket in ddp_buckets(numels, arrival=arrival, limits=(traced_rank.BUCKET_MIB * 2**20,))
    ]
    execution = folder / "execution-0.json" if with_execution else None
    for recorded in read_steps(folder / "kineto-0.json", execution):
        sizes = [(bucket.numel, bucket.dtype_bytes) for bucket in recorded.schedule.parameters]
        assert sizes == [(count, 4) for count in wanted] and len(recorded.sent) == len(wanted)
        ready = list(recorded.schedule.ready.values())
        assert ready == sorted(set(ready)) and len(ready) == len(wanted) > 2
        linear_0 = [
            index
            for index, entry in enumerate(recorded.schedule.backward)
            if entry.operator == "aten::linear#0"
        ]
        assert ready[0] < linear_0[0] < ready[-1]


def test_rank_is_replayed_alone_and_on_a_cluster(step: TracedSchedule, folder: Path) -> None:
    assert float(played_traces({"here": [step]}).step.seconds) == pytest.approx(
        step.schedule.seconds
    )
    cluster = Cluster({"here": ClusterDevice(count=4)}, Network(bandwidth=1e9, latency=1e-5))
    played = played_traces({"here": [step]}, cluster)
    durations = played.step.arrived - played.step.sent
    assert durations.tolist() == pytest.approx(
        [1e-5 + 1.5 * 4 * bucket.numel / 1e9 for bucket in step.schedule.parameters]
    )
    assert float(played.step.seconds) > step.schedule.seconds


@tiers.ALL
def test_two_ranks_wait_for_each_other(tmp_path: Path) -> None:
    script = Path(traced_rank.__file__)
    runs = [
        subprocess.Popen([sys.executable, script, str(rank), "2", tmp_path]) for rank in range(2)
    ]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    traces = {
        f"rank {rank}": read_steps(
            tmp_path / f"kineto-{rank}.json", tmp_path / f"execution-{rank}.json"
        )
        for rank in range(2)
    }
    played = played_traces(traces)
    assert played.cluster.ranks == 2 and len(played.buckets) > 2
    durations = played.step.arrived - played.step.sent
    steps = [[item.name for item in recorded] for recorded in traces.values()]
    assert steps[0] == steps[1]
    chosen = [
        pair
        for pair in zip(*traces.values(), strict=True)
        if durations.tolist()
        == pytest.approx([min(both) for both in zip(pair[0].sent, pair[1].sent, strict=True)])
    ]
    assert len(chosen) == 1
    with pytest.raises(ProfileError, match="rank 0 is there twice"):
        played_traces({"a": traces["rank 0"], "b": traces["rank 0"]})


def test_single_trace_represents_both_ranks(tmp_path: Path, folder: Path) -> None:
    def two(trace: dict[str, Any]) -> None:
        trace["distributedInfo"] |= {"world_size": 2}

    (alone,) = {len(played_traces({"a": read_steps(edited(folder, tmp_path, two))}).buckets)}
    assert alone > 2
    with pytest.raises(ProfileError, match="rank 0 is there twice"):
        played_traces(dict.fromkeys("abc", read_steps(edited(folder, tmp_path, two))))


def test_compressed_traces_are_the_same(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "kineto.json.gz"
    packed.write_bytes(gzip.compress((folder / "kineto-0.json").read_bytes()))
    assert len(kineto(packed).events) == len(kineto(folder / "kineto-0.json").events)


def test_work_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(device_trace()))
    first, last = read_steps(path)
    assert (first.rank, first.ranks) == (1, 2)
    assert [
        (entry.operator, round(entry.seconds * 1e6, 3)) for entry in first.schedule.forward
    ] == [("aten::linear#0", 10)]
    assert [
        (entry.operator, round(entry.seconds * 1e6, 3)) for entry in first.schedule.backward
    ] == [
        ("", 5),
        ("aten::linear#0", 20),
    ]
    assert first.schedule.ready == {"bucket 0": 1}
    (bucket,) = first.schedule.parameters
    assert (bucket.numel, bucket.dtype_bytes) == (64, 2)
    assert first.sent[0] == pytest.approx(30e-6)
    assert first.schedule.optimizer == pytest.approx(10e-6)
    assert last.schedule.optimizer == pytest.approx(7e-6)
    assert first.seconds == pytest.approx(75e-6)
    played = played_traces({"a": [first]})
    assert float(played.step.seconds) == pytest.approx(75e-6)
