"""Damaged traces: errors name the cause and its position.

Random changes end in a valid step or in such an error.
"""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx.errors import ProfileError
from qsync_fx.predictor.replayer.trace_schedules import execution_sizes, kineto, read_steps
from tests.support.planning.trace_files import Edit, device_trace, edited


def operators(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]


def no_backward(trace: dict[str, Any]) -> None:
    trace["traceEvents"] = [
        event for event in trace["traceEvents"] if "autograd::" not in str(event.get("name"))
    ]


@pytest.mark.parametrize(
    ("edit", "message", "where"),
    [
        (lambda trace: trace.pop("traceEvents"), "no list of traceEvents", ""),
        (lambda trace: trace.update(traceEvents=[]), "no event that lasts", ""),
        (
            lambda trace: operators(trace)[5].update(dur=-1),
            "has dur '-1', which is no time",
            "traceEvents[",
        ),
        (
            lambda trace: operators(trace)[5].update(ts=float("nan")),
            "has ts 'nan', which is no time",
            "traceEvents[",
        ),
        (
            lambda trace: operators(trace)[5].pop("dur"),
            "has dur 'None', which is no time",
            "traceEvents[",
        ),
        (lambda trace: operators(trace)[5].pop("name"), "has no name", "traceEvents["),
        (
            lambda trace: trace["distributedInfo"].update(rank=7),
            "rank is not one of its ranks",
            "distributedInfo",
        ),
        (no_backward, "contains no training step", ""),
    ],
)
def test_damaged_traces(edit: Edit, message: str, where: str, folder: Path, tmp_path: Path) -> None:
    path = edited(folder, tmp_path, edit)
    with pytest.raises(ProfileError, match="trace") as caught:
        read_steps(path)
    says_what_and_where(caught.value, path, message, where)


def nodes(trace: dict[str, Any]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = trace["nodes"]
    return result


def without_leaves(trace: dict[str, Any]) -> None:
    parents = {node["ctrl_deps"] for node in nodes(trace)}
    trace["nodes"] = [node for node in nodes(trace) if node["id"] in parents]


@pytest.mark.parametrize(
    ("edit", "message", "where"),
    [
        (lambda trace: trace.pop("nodes"), "has no nodes", ""),
        (without_leaves, "recorded functions are not in the", ""),
    ],
)
def test_damaged_execution_traces(
    edit: Edit, message: str, where: str, folder: Path, tmp_path: Path
) -> None:
    path = edited(folder, tmp_path, edit, "execution-0.json")
    with pytest.raises(ProfileError) as caught:
        read_steps(folder / "kineto-0.json", path)
    says_what_and_where(caught.value, None if "recorded" in message else path, message, where)


def says_what_and_where(error: ProfileError, path: Path | None, message: str, where: str) -> None:
    assert message in error.what
    assert (
        error.where is not None
        and where in error.where
        and (path is None or str(path) in error.where)
    )
    assert error.do


def test_files_that_are_cut_off(folder: Path, tmp_path: Path) -> None:
    content = (folder / "kineto-0.json").read_bytes()
    cut, packed = tmp_path / "cut.json", tmp_path / "cut.json.gz"
    cut.write_bytes(content[: len(content) // 2])
    packed.write_bytes(gzip.compress(content)[: -len(content) // 100])
    with pytest.raises(ProfileError, match="the trace is truncated") as caught:
        kineto(cut)
    assert "line" in str(caught.value.where) and caught.value.do
    with pytest.raises(ProfileError, match="is cut off or damaged"):
        kineto(packed)
    with pytest.raises(ProfileError, match="the execution trace is truncated"):
        execution_sizes(cut)
    with pytest.raises(ProfileError, match="cannot be read"):
        kineto(tmp_path / "none.json")
    cut.write_text("[1, 2]")
    with pytest.raises(ProfileError, match="is no JSON object"):
        kineto(cut)


ODD = st.sampled_from(
    [None, True, -1, 0, 1e300, 2**80, "", "7", "nan", [], [[]], {}, ["a"], {"a": 1}]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_ends_in_a_step_or_an_error(data: st.DataObject, tmp_path: Path) -> None:
    trace = device_trace()
    places = [
        trace,
        trace["distributedInfo"],
        *trace["traceEvents"],
        *(event["args"] for event in trace["traceEvents"]),
    ]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([place for place in places if place]))
        place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ODD)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    with suppress(ProfileError):
        for step in read_steps(path):
            assert step.schedule.seconds <= step.seconds * (1 + 1e-9) + 1e-9


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_of_an_execution_trace_ends_in_nodes_or_an_error(
    data: st.DataObject, tmp_path: Path
) -> None:
    names = ["[process]", "aten::linear", "aten::addmm"]
    attributes = [{"name": "rf_id", "value": 3}]
    inputs = {"values": [[1, 2, 0, 64, 4, "cpu"], [[5, 6, 0, 8, 2, "cpu"]]]}
    made = [
        {
            "id": index,
            "ctrl_deps": max(index - 1, 0),
            "name": name,
            "attrs": attributes,
            "inputs": inputs,
        }
        for index, name in enumerate(names)
    ]
    trace: dict[str, Any] = json.loads(json.dumps({"nodes": made}))
    place = data.draw(
        st.sampled_from(
            [trace, *trace["nodes"], trace["nodes"][1]["attrs"][0], trace["nodes"][1]["inputs"]]
        )
    )
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(ODD)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    with suppress(ProfileError):
        execution_sizes(path)
