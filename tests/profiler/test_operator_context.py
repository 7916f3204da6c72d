"""Operator times under unmeasured plans, from runs with the same state and similar neighbours."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from qsync_fx.devices.machine import this_machine
from qsync_fx.errors import ProfileError
from qsync_fx.formats import precision
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper.times import Seconds, Times
from qsync_fx.predictor.model.model_file import StoredGraph
from qsync_fx.profiler.profile import Model, Profile
from qsync_fx.profiler.profiled_times import ProfiledTimes
from qsync_fx.profiler.run_statistics import MeasuredOperator, MeasuredRun, Quantized, fitted

BF16, FP32, INT8 = "bf16", "fp32", "int8"


def state(computes: str, gives: str | None = None) -> OperandState:
    return OperandState(precision(computes), precision(gives or computes))


def run(
    label: str, *operators: tuple[str, str, float], planned: bool = False, outside: float = 0.0
) -> MeasuredRun:
    measured = [
        MeasuredOperator(f"{index}/linear", computes, gives, seconds, 2 * seconds)
        for index, (computes, gives, seconds) in enumerate(operators)
    ]
    inside = sum(seconds for *_, seconds in operators)
    return MeasuredRun(
        label, [(inside + outside, 2 * inside + 2 * outside, 0.25)], 0, measured, planned=planned
    )


def times(*runs: MeasuredRun) -> ProfiledTimes:
    empty = StoredGraph("cpu", [], [], [], [], [], [], [], [], 0)
    return ProfiledTimes(
        Profile(this_machine(), Model("Net", "0" * 16, 1), empty, [FP32, BF16], list(runs), "SGD")
    )


WIDE = run("fp32", (FP32, FP32, 1.0), (FP32, FP32, 2.0), (FP32, FP32, 3.0), outside=0.1)
NARROW = run("bf16", (BF16, BF16, 0.5), (BF16, BF16, 1.0), (BF16, BF16, 1.5), outside=0.3)
BETWEEN = run("between", (BF16, BF16, 0.6), (FP32, FP32, 2.2), (BF16, BF16, 1.7))


def test_profiled_times_implement_the_cost_mapper_protocol() -> None:
    profiled: Times = times(WIDE)
    assert (
        profiled.outside() == Seconds(pytest.approx(0.1), pytest.approx(0.2))
        and profiled.optimizer() == 0.25
    )


def test_a_state_that_was_measured_has_the_time_that_was_measured() -> None:
    alone = [None, None, None, None]
    assert times(WIDE, NARROW).operator("1/linear", state(FP32), alone) == Seconds(2.0, 4.0)
    assert times(WIDE, NARROW).operator("1/linear", state(BF16), alone) == Seconds(1.0, 2.0)


def test_run_with_equal_neighbours_is_preferred() -> None:
    profiled = times(WIDE, NARROW, BETWEEN)
    wide, narrow = state(FP32), state(BF16)
    assert profiled.operator("1/linear", wide, [wide, wide, None, None]) == Seconds(2.0, 4.0)
    assert profiled.operator("1/linear", wide, [narrow, narrow, None, None]) == Seconds(2.2, 4.4)
    # Two runs match one neighbour each.
    assert profiled.operator("1/linear", wide, [narrow, wide, None, None]) == Seconds(2.1, 4.2)


def test_least_is_a_lower_bound_over_neighbours() -> None:
    profiled = times(
        WIDE, NARROW, BETWEEN, run("odd", (BF16, FP32, 0.4), (FP32, BF16, 1.9), (BF16, BF16, 1.4))
    )
    states = [state(*names) for names in itertools.product((FP32, BF16), (FP32, BF16))]
    for index, operand_state in itertools.product(range(3), states):
        least = profiled.least(f"{index}/linear", operand_state)
        candidates = [
            profiled.operator(f"{index}/linear", operand_state, neighbours)
            for neighbours in itertools.product(states, repeat=4)
        ]
        assert least.forward <= min(candidate.forward for candidate in candidates)
        assert least.backward <= min(candidate.backward for candidate in candidates)
    assert profiled.least("1/linear", state(FP32)) == Seconds(2.0, 4.0)
    assert profiled.least("0/linear", state(BF16)) == Seconds(0.5, 1.0)


def test_nearer_neighbours_count_more() -> None:
    near = run(
        "near",
        (BF16, BF16, 1.0),
        (FP32, FP32, 1.0),
        (FP32, FP32, 7.0),
        (FP32, FP32, 1.0),
        (BF16, BF16, 1.0),
    )
    far = run(
        "far",
        (FP32, FP32, 1.0),
        (BF16, BF16, 1.0),
        (FP32, FP32, 9.0),
        (BF16, BF16, 1.0),
        (FP32, FP32, 1.0),
    )
    wide = state(FP32)
    assert times(near, far).operator("2/linear", wide, [wide] * 4) == Seconds(7.0, 14.0)


def test_measured_plan_is_predicted_exactly() -> None:
    """Pass times and proportions of operators equal the measured ones, regardless of other runs."""
    calls = [
        Quantized("0/linear", FP32, INT8, 100, False, 0.2),
        Quantized("0/linear", FP32, INT8, 100, True, 0.1),
    ]
    measured_run = replace(
        run(
            "plan",
            (BF16, BF16, 0.7),
            (FP32, FP32, 2.3),
            (BF16, BF16, 1.9),
            planned=True,
            outside=0.4,
        ),
        quantized=[replace(call, seconds=1.5 * call.seconds) for call in calls],
    )
    profiled = times(WIDE, NARROW, replace(BETWEEN, quantized=calls), measured_run)
    states = [state(BF16), state(FP32), state(BF16)]
    neighbours = [
        [states[index + by] if 0 <= index + by < 3 else None for by in (-1, 1, -2, 2)]
        for index in range(3)
    ]
    predicted = [
        profiled.operator(f"{index}/linear", states[index], neighbours[index]) for index in range(3)
    ]
    quantizing = profiled.cast("0/linear", FP32, INT8, 100, True)
    assert sum((*predicted, quantizing, profiled.outside()), Seconds(0.0, 0.0)) == Seconds(
        pytest.approx(measured_run.forward), pytest.approx(measured_run.backward)
    )
    for cost, seconds in zip(predicted, (0.7, 2.3, 1.9), strict=True):
        assert (
            cost.forward / predicted[0].forward == pytest.approx(seconds / 0.7)
            and not cost.interpolated
        )


@pytest.mark.parametrize(("computes", "gives"), list(itertools.product((FP32, BF16), (FP32, BF16))))
def test_unmeasured_state_is_interpolated(computes: str, gives: str) -> None:
    result = times(WIDE, NARROW).operator("0/linear", state(computes, gives), [None] * 4)
    assert result.interpolated == (computes != gives)
    assert result.forward == {FP32: 1.0, BF16: 0.5}[computes], (
        "the measured run with the same compute format is preferred"
    )


def test_a_format_or_an_operator_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ProfileError, match="no time in fp8") as caught:
        times(WIDE).operator("0/linear", state("fp8", BF16), [None] * 4)
    assert "fp8" in (caught.value.do or "")
    with pytest.raises(ProfileError, match="knows nothing") as caught:
        times(WIDE).operator("9/linear", state(FP32), [None] * 4)
    assert caught.value.where == "9/linear"


def test_quantizers_go_with_the_elements_and_other_casts_are_part_of_operators() -> None:
    calls = [
        Quantized("0/linear", before, INT8, numel, False, fixed + each * numel)
        for before, fixed, each in ((FP32, 1e-5, 1e-9), (BF16, 2e-5, 2e-9))
        for numel in (100, 300, 1000)
    ]
    profiled = times(replace(WIDE, quantized=calls))
    for before, seconds in ((FP32, 1e-5 + 500e-9), (BF16, 2e-5 + 1000e-9)):
        result = profiled.cast("0/linear", before, INT8, 500, True)
        assert (
            result.forward == pytest.approx(seconds)
            and result.backward == 0
            and not result.interpolated
        )
    assert profiled.cast("0/linear", BF16, INT8, 2000, True).interpolated, (
        "the size exceeds all measured sizes"
    )
    assert profiled.cast("0/linear", FP32, BF16, 500, True) == Seconds(0.0, 0.0)


def test_no_line_through_quantizers_is_negative_anywhere() -> None:
    calls = [
        Quantized("0/linear", FP32, INT8, n, False, t)
        for n, t in ((1000, 1e-6), (2000, 4e-6), (3000, 9e-6))
    ]
    (line,) = fitted([replace(WIDE, quantized=calls)]).values()
    assert line.fixed == 0 and line.each > 0
    (line,) = fitted(
        [replace(WIDE, quantized=[replace(call, numel=10) for call in calls])]
    ).values()
    assert line.seconds(10) == pytest.approx(14e-6 / 3) and line.each == 0
