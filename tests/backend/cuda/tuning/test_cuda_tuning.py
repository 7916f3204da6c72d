"""Decisions of the tuner from recorded timings, and buckets of problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from qsync_fx.backend.cuda import kernel_config
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.tuning import (
    MARGIN,
    Candidate,
    TunedChoice,
    TuningError,
    buckets,
    counterpart,
    name_of,
    problem_as_json,
    tune,
    tune_all,
)
from qsync_fx.errors import QSyncError
from tests.support.cuda.tuning_samples import (
    BF16,
    CONV,
    INT8,
    configs,
    problem_from,
    recording,
    timer,
)


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
    choice = tune(INT8, kernels, times)
    assert choice.name == kernels[0].name and choice.seconds == {"torch": 1.0, kernels[0].name: 0.9}


def test_failed_candidates_are_recorded_with_a_reason() -> None:
    kernels, times = timer([1.0], None, [0.5])
    choice = tune(INT8, kernels, times)
    assert choice.name == kernels[1].name
    assert list(choice.failed) == [kernels[0].name] and "recorded" in choice.failed[kernels[0].name]
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

    choice = tune(INT8, configs(1), Dying())
    assert choice.name == "torch" and list(choice.seconds) == ["torch"]


@pytest.mark.parametrize("nonsense", [[0.0], [-1.0], [float("nan")], [float("inf")], []])
def test_missing_timings_select_no_kernel(nonsense: list[float]) -> None:
    kernels, times = timer([1.0], nonsense)
    assert tune(INT8, kernels, times).name == "torch"
    kernels, times = timer(nonsense)
    with pytest.raises(TuningError, match="not positive numbers"):
        tune(INT8, kernels, times)


@given(
    st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8),
    st.lists(st.floats(-0.2, 0.2), min_size=9, max_size=9),
    st.randoms(use_true_random=False),
)
def test_choices_hold_under_noise(medians: list[float], noise: list[float], random: Any) -> None:
    """Check that noise with unchanged medians, in any order and with outliers, changes no choice,
    and that each choice is within the margin of the fastest.
    """
    offsets = sorted(noise)
    offsets = [value - offsets[4] for value in offsets]  # the median of nine is 0
    series = []
    for value in medians:
        noisy = [value * (1 + part) for part in offsets]
        random.shuffle(noisy)
        series.append(noisy)
    kernels, times = timer(*series)
    choice = tune(INT8, kernels, times)
    same_kernels, clean = timer(*[[value] for value in medians])
    assert choice.name == tune(INT8, same_kernels, clean).name
    assert choice.best <= min(choice.seconds.values()) * (1 + MARGIN)


def test_candidates_are_interleaved_in_rotating_order() -> None:
    order: list[str] = []

    class Watching:
        def measure(self, candidate: Candidate) -> list[float]:
            order.append(name_of(candidate))
            return [1.0]

    kernels = configs(2)
    tune(INT8, kernels, Watching(), rounds=3)
    rounds = [order[start : start + 3] for start in range(0, 9, 3)]
    assert (
        all(sorted(part) == sorted(order[:3]) for part in rounds)
        and len({part[0] for part in rounds}) == 3
    )


@pytest.mark.parametrize(("int8", "bf16", "faster"), [(0.4, 0.9, True), (0.95, 0.9, False)])
def test_int8_is_compared_with_bf16(int8: float, bf16: float, faster: bool) -> None:
    kernel = configs(1)[0].name
    times = recording({INT8: {"torch": [1.0], kernel: [int8]}, BF16: {"torch": [bf16]}})
    choices = {
        choice.problem: choice for choice in tune_all([INT8], lambda p: configs(1), times.timer)
    }
    assert choices[INT8].faster_than_bf16 is faster and choices[BF16].faster_than_bf16 is None


@pytest.mark.parametrize(
    ("arch", "fmt"), [("sm_75", "fp16"), ("sm_80", "bf16"), ("sm_90a", "bf16")]
)
def test_a_device_without_a_unit_for_bf16_compares_with_fp16(arch: Arch, fmt: str) -> None:
    wide = kernel_config.wide(arch)
    assert wide == fmt
    floats = replace(BF16, a=fmt, b=fmt)
    assert buckets([INT8], wide) == [INT8, floats]
    times = recording({INT8: {"torch": [0.9]}, floats: {"torch": [0.8]}})
    choice, _ = tune_all([INT8], lambda p: (), times.timer, wide=wide)
    assert choice.faster_than_bf16 is False


def test_unmeasurable_problem_is_reported_and_tuning_continues() -> None:
    reports: list[tuple[Problem, bool, str]] = []
    times = recording({INT8: {"torch": [1.0]}})

    def report(problem: Problem, choice: TunedChoice | None, why: str) -> None:
        reports.append((problem, choice is None, why))

    choices = tune_all([CONV, INT8], lambda p: (), times.timer, report=report)
    assert [choice.problem for choice in choices] == [INT8] and choices[0].faster_than_bf16 is None
    assert {problem: failed for problem, failed, _ in reports} == {
        CONV: True,
        INT8: False,
        BF16: True,
        counterpart(CONV): True,
    }
    assert all("recorded" in why for _, failed, why in reports if failed)


def test_problems_of_one_bucket_are_tuned_once() -> None:
    nearly = [replace(INT8, m=m) for m in (4000, 4090, 4096)]
    assert buckets(nearly) == [INT8, BF16]


SIZES = st.integers(1, 2**31 - 1)


@given(SIZES, SIZES, SIZES)
def test_bucket_is_idempotent(m: int, n: int, k: int) -> None:
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
        GemmProblem,
        SIZES,
        SIZES,
        SIZES,
        formats,
        formats,
        outs,
        majors,
        majors,
        scales,
        scales,
        st.booleans(),
    )


@given(gemms())
def test_problems_survive_json(problem: GemmProblem) -> None:
    assert problem_from(problem_as_json(problem)) == problem
    assert problem_from(problem_as_json(CONV)) == CONV


def test_windows_that_leave_no_pixel_are_no_problem() -> None:
    data = problem_as_json(replace(CONV, r=64))
    with pytest.raises(QSyncError, match="r, s"):
        problem_from(data)
