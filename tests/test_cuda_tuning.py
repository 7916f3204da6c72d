"""The tuner's decisions, from recorded timings, and the tables that keep them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from qsync_fx.backend.cuda import recorded, table
from qsync_fx.backend.cuda.config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.problem_json import problem_as_json, problem_from
from qsync_fx.backend.cuda.recorded import Keeper, RecordedTimer, Recording
from qsync_fx.backend.cuda.table import Environment
from qsync_fx.backend.cuda.tuning import (
    MARGIN,
    Candidate,
    Choice,
    TuningError,
    buckets,
    counterpart,
    name_of,
    tune,
    tune_all,
)
from qsync_fx.errors import QSyncError

INT8 = GemmProblem(4096, 4096, 4096, "int8", "int8", "bf16", a_scale="tensor", b_scale="tensor")
BF16 = replace(INT8, a="bf16", b="bf16", a_scale="none", b_scale="none")
CONV = ConvProblem("fprop", 32, 28, 28, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "int8", "int8", "bf16")
HERE = Environment("NVIDIA H200", "570.86", "13.0", "2.13.0", "4.2.0", 1)


def configs(count: int) -> list[KernelConfig]:
    return [KernelConfig("gemm", "sm_80", "int8", "int8", "bf16", (128, 128, 64), stages=3 + at) for at in range(count)]


def timer(*seconds: list[float] | None) -> tuple[list[KernelConfig], RecordedTimer]:
    """Returns candidates and what times them; the first list is torch's, None one that does not run."""
    found = configs(len(seconds) - 1)
    names = ["torch", *(config.name for config in found)]
    return found, RecordedTimer({name: s for name, s in zip(names, seconds, strict=True) if s is not None})


def test_a_kernel_has_to_be_clearly_faster_than_torch() -> None:
    kernels, times = timer([1.0], [0.98])
    assert tune(INT8, kernels, times).name == "torch"
    kernels, times = timer([1.0], [0.96])
    assert tune(INT8, kernels, times).name == kernels[0].name


def test_of_equals_the_earlier_wins_and_the_fastest_is_never_far() -> None:
    kernels, times = timer([1.0], [0.52], [0.505], [0.5])
    assert tune(INT8, kernels, times).name == kernels[1].name


def test_the_median_decides_so_outliers_do_not() -> None:
    kernels, times = timer([1.0, 1.0, 1.0, 1.0, 0.1], [0.9, 0.9, 0.9, 90.0, 90.0])
    found = tune(INT8, kernels, times)
    assert found.name == kernels[0].name and found.seconds == {"torch": 1.0, kernels[0].name: 0.9}


def test_candidates_that_fail_are_kept_with_the_reason() -> None:
    kernels, times = timer([1.0], None, [0.5])
    found = tune(INT8, kernels, times)
    assert found.name == kernels[1].name
    assert list(found.failed) == [kernels[0].name] and "recorded" in found.failed[kernels[0].name]
    kernels, times = timer(None, [0.7])
    assert tune(INT8, kernels, times).name == kernels[0].name


def test_a_candidate_that_fails_late_has_no_time() -> None:
    class Dying:
        def __init__(self) -> None:
            self.left = 3

        def measure(self, candidate: Candidate) -> list[float]:
            if candidate == "torch":
                return [1.0]
            self.left -= 1
            if self.left < 0:
                raise TuningError("the kernel cannot be launched")
            return [0.1]

    found = tune(INT8, configs(1), Dying())
    assert found.name == "torch" and list(found.seconds) == ["torch"]


@pytest.mark.parametrize("nonsense", [[0.0], [-1.0], [float("nan")], [float("inf")], []])
def test_timings_that_are_none_choose_nothing(nonsense: list[float]) -> None:
    kernels, times = timer([1.0], nonsense)
    assert tune(INT8, kernels, times).name == "torch"
    kernels, times = timer(nonsense)
    with pytest.raises(TuningError, match="no positive numbers"):
        tune(INT8, kernels, times)


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8),
    st.lists(st.floats(-0.2, 0.2), min_size=9, max_size=9),
    st.randoms(use_true_random=False),
)
def test_choices_hold_under_noise(medians: list[float], noise: list[float], random: Any) -> None:
    """Noise around the same medians, in any order, with outliers: the same choice, and never one that is far from the fastest."""
    around = sorted(noise)
    around = [value - around[4] for value in around]  # the median of nine is where it was
    series = []
    for value in medians:
        shaken = [value * (1 + part) for part in around]
        random.shuffle(shaken)
        series.append(shaken)
    kernels, times = timer(*series)
    found = tune(INT8, kernels, times)
    still, clean = timer(*[[value] for value in medians])
    assert found.name == tune(INT8, still, clean).name
    assert found.best <= min(found.seconds.values()) * (1 + MARGIN)


def test_candidates_take_turns_and_nobody_is_always_first() -> None:
    order: list[str] = []

    class Watching:
        def measure(self, candidate: Candidate) -> list[float]:
            order.append(name_of(candidate))
            return [1.0]

    kernels = configs(2)
    tune(INT8, kernels, Watching(), rounds=3)
    rounds = [order[at : at + 3] for at in range(0, 9, 3)]
    assert all(sorted(part) == sorted(order[:3]) for part in rounds) and len({part[0] for part in rounds}) == 3


def recording(timings: dict[Problem, dict[str, list[float]]]) -> Recording:
    return Recording(HERE, "sm_90a", timings)


@pytest.mark.parametrize(("int8", "bf16", "faster"), [(0.4, 0.9, True), (0.95, 0.9, False)])
def test_int8_is_compared_with_bf16(int8: float, bf16: float, faster: bool) -> None:
    kernel = configs(1)[0].name
    times = recording({INT8: {"torch": [1.0], kernel: [int8]}, BF16: {"torch": [bf16]}})
    found = {choice.problem: choice for choice in tune_all([INT8], lambda p: configs(1), times.timer)}
    assert found[INT8].faster_than_bf16 is faster and found[BF16].faster_than_bf16 is None


def test_what_cannot_be_measured_is_reported_and_the_rest_goes_on() -> None:
    said: list[tuple[Problem, bool, str]] = []
    times = recording({INT8: {"torch": [1.0]}})

    def report(problem: Problem, choice: Choice | None, why: str) -> None:
        said.append((problem, choice is None, why))

    found = tune_all([CONV, INT8], lambda p: (), times.timer, report=report)
    assert [choice.problem for choice in found] == [INT8] and found[0].faster_than_bf16 is None
    assert {problem: failed for problem, failed, _ in said} == {
        CONV: True,
        INT8: False,
        BF16: True,
        counterpart(CONV): True,
    }
    assert all("recorded" in why for _, failed, why in said if failed)


def test_problems_of_one_bucket_are_tuned_once() -> None:
    nearly = [replace(INT8, m=m) for m in (4000, 4090, 4096)]
    assert buckets(nearly) == [INT8, BF16]


SIZES = st.integers(1, 2**31 - 1)


@given(SIZES, SIZES, SIZES)
def test_buckets_are_problems_of_their_own_bucket(m: int, n: int, k: int) -> None:
    bucket = replace(INT8, m=m, n=n, k=k).bucket()
    assert bucket.bucket() == bucket and bucket.m >= m and bucket.m - m <= m / 4 + 1


def gemms() -> st.SearchStrategy[GemmProblem]:
    formats, majors, scales = (
        st.sampled_from(["int8", "bf16"]),
        st.sampled_from(["row", "column"]),
        st.sampled_from(["none", "channel"]),
    )
    outs = st.sampled_from(["fp32", "fp16", "bf16"])
    return st.builds(
        GemmProblem, SIZES, SIZES, SIZES, formats, formats, outs, majors, majors, scales, scales, st.booleans()
    )


@given(gemms())
def test_problems_survive_json(problem: GemmProblem) -> None:
    assert problem_from(json.loads(json.dumps(problem_as_json(problem))), "here") == problem
    assert problem_from(json.loads(json.dumps(problem_as_json(CONV))), "here") == CONV


def test_tables_are_kept_and_merged(tmp_path: Path) -> None:
    path = table.path_in(tmp_path / "tuning", HERE)
    first = Choice(INT8, "torch", {"torch": 0.5}, {"other": "why"}, True)
    table.save(path, HERE, [first, Choice(BF16, "torch", {"torch": 1.0})])
    second = replace(first, seconds={"torch": 0.25})
    table.save(path, HERE, [second, Choice(CONV, "torch", {"torch": 2.0})])
    found = table.load(path, HERE)
    assert found.choices == {
        INT8: second,
        BF16: Choice(BF16, "torch", {"torch": 1.0}),
        CONV: Choice(CONV, "torch", {"torch": 2.0}),
    }
    assert found.choice(replace(INT8, m=4001)) == second and found.choice(replace(INT8, m=9)) is None
    assert [p.suffix for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_without_a_file_a_table_is_empty(tmp_path: Path) -> None:
    assert table.load(tmp_path / "none.json", HERE).choices == {}
    with pytest.raises(TuningError, match="No such file"):
        table.load(tmp_path / "none.json")


def test_two_processes_write_one_table(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    program = f"""
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_cuda_tuning import BF16, HERE
from qsync_fx.backend.cuda import table
from qsync_fx.backend.cuda.tuning import Choice
for at in range(10):
    problem = replace(BF16, m=1024 << int(sys.argv[1]), n=1024 << at)
    table.save(Path({str(path)!r}), HERE, [Choice(problem, "torch", {{"torch": 1.0}})])
"""
    writers = [subprocess.Popen([sys.executable, "-c", program, str(at)]) for at in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert len(table.load(path, HERE).choices) == 20


def _whole(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "table.json"
    table.save(path, HERE, [Choice(INT8, "torch", {"torch": 0.5})])
    return path, json.loads(path.read_text())


def _row(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["choices"][0].update(fields)


def _problem(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["choices"][0]["problem"].update(fields)


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another format": lambda data: data.update(format="plan"),
    "a later version": lambda data: data.update(version=2),
    "no environment": lambda data: data.pop("environment"),
    "an environment with more": lambda data: data["environment"].update(extra="1"),
    "an environment of lists": lambda data: data["environment"].update(gpu=["a"]),
    "choices that are no list": lambda data: data.update(choices={"a": 1}),
    "a choice that is text": lambda data: data.update(choices=["x"]),
    "a winner without a time": _row(name="gemm_somewhere"),
    "a winner that is a list": _row(name=["torch"]),
    "no seconds": _row(seconds={}),
    "negative seconds": _row(seconds={"torch": -1.0}),
    "infinite seconds": _row(seconds={"torch": float("inf")}),
    "seconds that are true": _row(seconds={"torch": True}),
    "endless names": _row(seconds={"torch": 1.0, "x" * 10**6: 1.0}),
    "an answer that is text": _row(faster_than_bf16="yes"),
    "half a round": _row(rounds=0.5),
    "a problem that is none": _row(problem=[]),
    "a size of text": _problem(m="4096"),
    "a size of zero": _problem(n=0),
    "a size beyond INT32": _problem(k=2**31),
    "a size that is true": _problem(k=True),
    "a size between buckets": _problem(m=4095),
    "an unknown format": _problem(a="int8; rm"),
    "another field": _problem(config={"schedule": "x"}),
    "a bias that is a number": _problem(bias=1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_are_refused_whole(tmp_path: Path, name: str) -> None:
    path, data = _whole(tmp_path)
    HOSTILE[name](data)
    path.write_text(json.dumps(data))
    with pytest.raises(TuningError):
        table.load(path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 10**5, '{"format": 1e999}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_files_that_are_no_tables(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TuningError):
        table.load(path)


def test_a_table_of_another_environment_is_not_used(tmp_path: Path) -> None:
    path, _ = _whole(tmp_path)
    with pytest.raises(TuningError, match="another environment"):
        table.load(path, replace(HERE, driver="999"))
    assert table.path_in(tmp_path, HERE) != table.path_in(tmp_path, replace(HERE, driver="999"))


def test_an_unreadable_table_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text("what somebody wrote")
    table.save(path, HERE, [Choice(INT8, "torch", {"torch": 0.5})])
    assert table.load(path, HERE).choice(INT8) is not None
    assert (tmp_path / "table.json.unreadable").read_text() == "what somebody wrote"


def test_a_run_that_fails_leaves_the_table(tmp_path: Path) -> None:
    path, _ = _whole(tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        table.save(path, HERE, [replace(Choice(CONV, "torch", {"torch": 1.0}), name=object())])  # type: ignore[arg-type]
    assert path.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".lock") == [
        path.name
    ]


def test_recordings_are_read_back(tmp_path: Path) -> None:
    kernels, times = timer([1.0, 1.1], [0.5, 0.6])
    keeper = Keeper(times)
    tune(INT8, kernels, keeper, rounds=2)
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(recorded.as_json(recording({INT8: keeper.seconds}))))
    found = recorded.load(path)
    assert found.environment == HERE and found.arch == "sm_90a"
    again = tune(INT8, kernels, found.timer(INT8), rounds=1)
    assert again.name == kernels[0].name and again.seconds == tune(INT8, kernels, times, rounds=1).seconds
    # A problem of a recorded bucket has its timings.
    assert found.timer(replace(INT8, m=4090)).seconds == keeper.seconds


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(arch="sm_120"),
        lambda data: data.update(timings=1),
        lambda data: data.update(timings=[{"problem": {}, "seconds": {"torch": [1.0]}}]),
        lambda data: data["timings"][0].update(seconds={"torch": []}),
        lambda data: data["timings"][0].update(seconds={"torch": ["fast"]}),
        lambda data: data["timings"][0].update(seconds=[1.0]),
        lambda data: data.update(format="qsync tuning table"),
    ],
)
def test_hostile_recordings_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = recorded.as_json(recording({INT8: {"torch": [1.0]}}))
    change(data)
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TuningError):
        recorded.load(path)


def test_windows_that_leave_no_pixel_are_no_problem() -> None:
    data = problem_as_json(replace(CONV, r=64))
    with pytest.raises(QSyncError, match="r, s"):
        problem_from(data, "here")
