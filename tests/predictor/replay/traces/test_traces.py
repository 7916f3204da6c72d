"""Traces that torch's profilers wrote, read into schedules; and what is wrong with those that are damaged."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tiers
import traced_rank
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx.errors import ProfileError
from qsync_fx.predictor import ddp_buckets
from qsync_fx.predictor.replay.cluster import Cluster, Device, Network
from qsync_fx.predictor.replay.traces.execution import execution_trace
from qsync_fx.predictor.replay.traces.kineto import kineto
from qsync_fx.predictor.replay.traces.ranks import played_traces, read_steps
from qsync_fx.predictor.replay.traces.traced import Traced
from qsync_fx.predictor.schedule import Entry, Part

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both traces of a run of one rank, and the order in which its gradients arrived."""
    where = tmp_path_factory.mktemp("traces")
    arrival = traced_rank.main(0, 1, str(where))
    (where / "arrival.json").write_text(json.dumps(arrival))
    return where


@pytest.fixture(scope="module")
def step(folder: Path) -> Traced:
    found = read_steps(folder / "kineto-0.json", folder / "execution-0.json")
    assert len(found) == traced_rank.STEPS
    return found[1]


def seconds(entries: tuple[Entry, ...]) -> float:
    return sum(entry.seconds for entry in entries)


def test_operators_are_forward_and_backward_under_one_name(step: Traced) -> None:
    forward = [entry.operator for entry in step.schedule.forward if entry.part is Part.FORWARD]
    linears, relus = ([f"aten::{kind}#{at}" for at in range(count)] for kind, count in (("linear", 4), ("relu", 2)))
    assert [name for name in forward if "linear" in name] == linears
    backward = [entry.operator for entry in step.schedule.backward if entry.part is Part.BACKWARD]
    differentiated = [name for name in dict.fromkeys(backward) if "linear" in name or "relu" in name]
    order = [linears[3], linears[2], relus[1], linears[1], relus[0], linears[0]]
    assert differentiated == order
    assert {entry.part for entry in step.schedule.forward} == {Part.FORWARD, Part.OUTSIDE}


def test_a_schedule_takes_as_long_as_its_step(folder: Path) -> None:
    traced = json.loads((folder / "kineto-0.json").read_text())["traceEvents"]
    for found in read_steps(folder / "kineto-0.json"):
        (mark,) = (event for event in traced if event.get("name") == found.name and event["ph"] == "X")
        assert found.seconds == pytest.approx(mark["dur"] / 1e6)
        schedule = found.schedule
        waited = found.seconds - schedule.seconds
        assert 0 <= waited <= sum(sent.seconds for sent in found.sent) + 1e-6
        adamw = next(
            event
            for event in traced
            if str(event.get("name")).startswith("Optimizer.step#")
            and mark["ts"] < event["ts"] < mark["ts"] + mark["dur"]
        )
        assert schedule.optimizer >= adamw["dur"] / 1e6 - 1e-6


@pytest.mark.parametrize("with_execution", [True, False])
def test_buckets_are_those_of_ddp(folder: Path, with_execution: bool) -> None:
    """Their sizes stand in both traces."""
    numels = [parameter.numel() for parameter in traced_rank.model().parameters()]
    arrival = json.loads((folder / "arrival.json").read_text())
    wanted = [
        sum(numels[at] for at in bucket)
        for bucket in ddp_buckets(numels, arrival=arrival, limits=(traced_rank.BUCKET_MIB * 2**20,))
    ]
    execution = folder / "execution-0.json" if with_execution else None
    for found in read_steps(folder / "kineto-0.json", execution):
        assert [(sent.elements, sent.element_bytes) for sent in found.sent] == [(count, 4) for count in wanted]
        assert [parameter.numel for parameter in found.schedule.parameters] == wanted
        ready = list(found.schedule.ready.values())
        assert ready == sorted(set(ready)) and len(ready) == len(wanted) > 2
        linear_0 = [at for at, entry in enumerate(found.schedule.backward) if entry.operator == "aten::linear#0"]
        assert ready[0] < linear_0[0] < ready[-1]


def test_one_rank_is_replayed_on_its_own_and_on_a_cluster(step: Traced, folder: Path) -> None:
    assert float(played_traces({"here": [step]}).step.seconds) == pytest.approx(step.schedule.seconds)
    cluster = Cluster({"here": Device(count=4)}, Network(bandwidth=1e9, latency=1e-5))
    played = played_traces({"here": [step]}, cluster)
    taken = played.step.arrived - played.step.sent
    assert taken.tolist() == pytest.approx([1e-5 + 1.5 * 4 * sent.elements / 1e9 for sent in step.sent])
    assert float(played.step.seconds) > step.schedule.seconds


@tiers.ALL
def test_two_ranks_wait_for_each_other(tmp_path: Path) -> None:
    script = Path(traced_rank.__file__)
    runs = [subprocess.Popen([sys.executable, script, str(rank), "2", tmp_path]) for rank in range(2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    traces = {
        f"rank {rank}": read_steps(tmp_path / f"kineto-{rank}.json", tmp_path / f"execution-{rank}.json")
        for rank in range(2)
    }
    played = played_traces(traces)
    assert played.cluster.ranks == 2 and len(played.buckets) > 2
    taken = played.step.arrived - played.step.sent
    steps = [[one.name for one in found] for found in traces.values()]
    assert steps[0] == steps[1]
    chosen = [
        pair
        for pair in zip(*traces.values(), strict=True)
        if taken.tolist()
        == pytest.approx([min(a.seconds, b.seconds) for a, b in zip(pair[0].sent, pair[1].sent, strict=True)])
    ]
    assert len(chosen) == 1
    with pytest.raises(ProfileError, match="rank 0 is there twice"):
        played_traces({"a": traces["rank 0"], "b": traces["rank 0"]})


def test_one_of_two_ranks_stands_for_both(tmp_path: Path, folder: Path) -> None:
    def two(trace: dict[str, Any]) -> None:
        trace["distributedInfo"] |= {"world_size": 2}

    (alone,) = {len(played_traces({"a": read_steps(edited(folder, tmp_path, two))}).buckets)}
    assert alone > 2
    with pytest.raises(ProfileError, match="rank 0 is there twice"):
        played_traces(dict.fromkeys("abc", read_steps(edited(folder, tmp_path, two))))


def edited(folder: Path, into: Path, edit: Edit, name: str = "kineto-0.json") -> Path:
    tree = json.loads((folder / name).read_text())
    edit(tree)
    path = into / name
    path.write_text(json.dumps(tree))
    return path


def operators(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]


def no_backward(trace: dict[str, Any]) -> None:
    trace["traceEvents"] = [event for event in trace["traceEvents"] if "autograd::" not in str(event.get("name"))]


def backwards(trace: dict[str, Any]) -> None:
    arrow = next(event for event in trace["traceEvents"] if event.get("cat") == "fwdbwd" and event["ph"] == "f")
    arrow["ts"] -= 1e9


@pytest.mark.parametrize(
    ("edit", "what", "where"),
    [
        (lambda trace: trace.pop("traceEvents"), "no list of traceEvents", ""),
        (lambda trace: trace.update(traceEvents=[]), "no event that lasts", ""),
        (lambda trace: operators(trace)[5].update(dur=-1), "has dur '-1', which is no time", "traceEvents["),
        (lambda trace: operators(trace)[5].update(ts=float("nan")), "has ts 'nan', which is no time", "traceEvents["),
        (lambda trace: operators(trace)[5].pop("dur"), "has dur 'None', which is no time", "traceEvents["),
        (lambda trace: operators(trace)[5].pop("name"), "has no name", "traceEvents["),
        (lambda trace: trace["distributedInfo"].update(rank=7), "rank is not one of its ranks", "distributedInfo"),
        (no_backward, "holds no training step", ""),
        (backwards, "runs in a circle", ""),
    ],
)
def test_damaged_traces(edit: Edit, what: str, where: str, folder: Path, tmp_path: Path) -> None:
    path = edited(folder, tmp_path, edit)
    with pytest.raises(ProfileError, match="trace") as caught:
        read_steps(path)
    says_what_and_where(caught.value, path, what, where)


def nodes(trace: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trace["nodes"]
    return found


def circle(trace: dict[str, Any]) -> None:
    by_id = {node["id"]: node for node in nodes(trace)}
    inner = next(node for node in nodes(trace) if node["name"] == "aten::addmm")
    by_id[inner["ctrl_deps"]]["ctrl_deps"] = inner["id"]


def without_leaves(trace: dict[str, Any]) -> None:
    parents = {node["ctrl_deps"] for node in nodes(trace)}
    trace["nodes"] = [node for node in nodes(trace) if node["id"] in parents]


@pytest.mark.parametrize(
    ("edit", "what", "where"),
    [
        (lambda trace: trace.pop("nodes"), "has no nodes", ""),
        (lambda trace: nodes(trace)[5].pop("id"), "lacks its id", "nodes[5]"),
        (lambda trace: nodes(trace)[5].update(id=nodes(trace)[4]["id"]), "two nodes have the id", "nodes[5]"),
        (lambda trace: nodes(trace)[9].update(ctrl_deps=nodes(trace)[9]["id"]), "calls run in a circle", "node "),
        (circle, "calls run in a circle: ", "node "),
        (lambda trace: nodes(trace).__delitem__(slice(0, 3)), "is cut off", "node "),
        (without_leaves, "recorded functions are not in the", ""),
    ],
)
def test_damaged_execution_traces(edit: Edit, what: str, where: str, folder: Path, tmp_path: Path) -> None:
    path = edited(folder, tmp_path, edit, "execution-0.json")
    with pytest.raises(ProfileError) as caught:
        read_steps(folder / "kineto-0.json", path)
    says_what_and_where(caught.value, None if "recorded" in what else path, what, where)


def says_what_and_where(error: ProfileError, path: Path | None, what: str, where: str) -> None:
    assert what in error.what
    assert error.where is not None and where in error.where and (path is None or str(path) in error.where)
    assert error.do


def test_files_that_are_cut_off(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "kineto-0.json").read_bytes()
    cut, packed = tmp_path / "cut.json", tmp_path / "cut.json.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    packed.write_bytes(gzip.compress(whole)[: -len(whole) // 100])
    with pytest.raises(ProfileError, match="ends in the middle") as caught:
        kineto(cut)
    assert "line" in str(caught.value.where) and caught.value.do
    with pytest.raises(ProfileError, match="is cut off or damaged"):
        kineto(packed)
    with pytest.raises(ProfileError, match="the execution trace ends in the middle"):
        execution_trace(cut)
    with pytest.raises(ProfileError, match="cannot be read"):
        kineto(tmp_path / "none.json")
    cut.write_text("[1, 2]")
    with pytest.raises(ProfileError, match="is no JSON object"):
        kineto(cut)


def test_compressed_traces_are_the_same(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "kineto.json.gz"
    packed.write_bytes(gzip.compress((folder / "kineto-0.json").read_bytes()))
    assert len(kineto(packed).events) == len(kineto(folder / "kineto-0.json").events)


def device_trace() -> dict[str, Any]:
    """Written by hand in the form of a trace of two A100 (Holistic Trace Analysis, MIT): kernels run later than they are asked for.

    Two steps; in each the forward kernel of 10 us, a gap of 5, the backward kernel of 20, then an all-reduce beside nothing of 30, then the
    optimizer's kernel of 7 and, before the next step, 3 of nothing.
    """
    events: list[dict[str, Any]] = []

    def event(category: str, name: str, track: int, begin: float, duration: float, **args: object) -> None:
        one = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": track, "ts": begin, "dur": duration}
        events.append({**one, "args": args})

    numbers = iter(range(1000))

    def asked(name: str, host: float, device: float, duration: float, stream: int = 7, **args: object) -> None:
        number = next(numbers)
        event("cuda_runtime", "cudaLaunchKernel", 1, host, 0.1, correlation=number)
        event("kernel", name, stream, device, duration, correlation=number, **args)

    for at, begin in enumerate((0.0, 75.0)):
        event("user_annotation", f"ProfilerStep#{at}", 1, begin, 74)
        event("cpu_op", "aten::linear", 1, begin + 1, 2, **{"Sequence number": at})
        asked("gemm", begin + 2, begin + 100, 10)
        event(
            "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 1, begin + 4, 2, **{"Sequence number": at}
        )
        asked("gemm_backward", begin + 5, begin + 115, 20)
        nccl = {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "Half"}
        asked("ncclDevKernel_AllReduce_Sum_f16_RING_LL", begin + 6.5, begin + 135, 30, 40, **nccl)
        event("user_annotation", "Optimizer.step#SGD.step", 1, begin + 8, 5)
        asked("sgd", begin + 9, begin + 165, 7)
    return {"traceEvents": events, "distributedInfo": {"rank": 1, "world_size": 2}}


def test_work_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(device_trace()))
    first, last = read_steps(path)
    assert (first.rank, first.ranks) == (1, 2)
    assert [(entry.operator, round(entry.seconds * 1e6, 3)) for entry in first.schedule.forward] == [
        ("aten::linear#0", 10)
    ]
    assert [(entry.operator, round(entry.seconds * 1e6, 3)) for entry in first.schedule.backward] == [
        ("", 5),
        ("aten::linear#0", 20),
    ]
    assert first.schedule.ready == {"bucket 0": 1}
    assert (first.sent[0].elements, first.sent[0].element_bytes) == (64, 2)
    assert first.sent[0].seconds == pytest.approx(30e-6)
    assert first.schedule.optimizer == pytest.approx(10e-6)
    assert last.schedule.optimizer == pytest.approx(7e-6)
    assert first.seconds == pytest.approx(75e-6)
    played = played_traces({"a": [first]})
    assert float(played.step.seconds) == pytest.approx(75e-6)


ODD = st.sampled_from([None, True, -1, 0, 1e300, 2**80, "", "7", "nan", [], [[]], {}, ["a"], {"a": 1}])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_ends_in_a_step_or_an_error(data: st.DataObject, tmp_path: Path) -> None:
    trace = device_trace()
    places = [trace, trace["distributedInfo"], *trace["traceEvents"], *(one["args"] for one in trace["traceEvents"])]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([place for place in places if place]))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ODD)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    with suppress(ProfileError):
        for found in read_steps(path):
            assert found.schedule.seconds <= found.seconds * (1 + 1e-9) + 1e-9


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_an_execution_trace_ends_in_nodes_or_an_error(data: st.DataObject, tmp_path: Path) -> None:
    names = ["[process]", "aten::linear", "aten::addmm"]
    attributes = [{"name": "rf_id", "value": 3}]
    inputs = {"values": [[1, 2, 0, 64, 4, "cpu"], [[5, 6, 0, 8, 2, "cpu"]]]}
    made = [
        {"id": at, "ctrl_deps": max(at - 1, 0), "name": name, "attrs": attributes, "inputs": inputs}
        for at, name in enumerate(names)
    ]
    trace: dict[str, Any] = json.loads(json.dumps({"nodes": made}))
    place = data.draw(
        st.sampled_from([trace, *trace["nodes"], trace["nodes"][1]["attrs"][0], trace["nodes"][1]["inputs"]])
    )
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ODD)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    with suppress(ProfileError):
        assert execution_trace(path)
