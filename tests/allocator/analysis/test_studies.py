"""Plan analysis: allocator comparison, single changes, what-if plans and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from qsync_fx import PlanError
from qsync_fx.allocator import PlanNoteKind, PlanResult, Problem, evaluate_plan
from qsync_fx.allocator.analysis import (
    Why,
    changes_table,
    compare,
    comparison_table,
    front_table,
    pareto,
    side_by_side,
    single_change,
    steps_table,
    what_if,
)
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.cost_mapper.times import Seconds
from qsync_fx.text_tables import plain
from tests.support.planning.allocation_problems import PlainTimes, alone, fleet


class NarrowIsFaster(PlainTimes):
    """Times proportional to the bits of the format."""

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        seconds, share = (
            self._drawn(operator),
            (state.precision.bits if state.precision else 32) / 32,
        )
        return Seconds(seconds.forward * share, seconds.backward * share)

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        return Seconds(1e-6, 0.0)


def tight() -> Problem:
    """Return a problem whose time limit excludes FP32 for all operators."""
    problem = fleet("mlp", times=NarrowIsFaster)
    fastest = (
        MilpAllocator()
        .allocate(replace(problem, least="seconds", variance=float("inf")))
        .evaluation.seconds
    )
    return replace(problem, seconds=fastest * 1.1)


def answered(problem: Problem | None = None) -> PlanResult:
    return MilpAllocator().allocate(problem or tight())


def test_allocators_stand_side_by_side() -> None:
    problem = tight()
    done: list[str] = []
    results = compare(problem, side_by_side(problem), done.append)
    names = [result.allocator for result in results]
    assert names == done
    formats = [f"uniform-{fmt}" for fmt in ("int8", "bf16", "fp32")]
    assert {"milp", "paper", *formats} <= {*names}
    assert len({*names}) == len(names)
    exact = next(result for result in results if result.allocator == "milp")
    assert exact.answer is not None
    assert exact.gap is not None
    for result in results:
        assert result.answer is not None
        assert result.answer.evaluation == evaluate_plan(problem, result.answer.plans)
        if result.answer.fits:
            assert result.gap is not None
            assert result.gap >= exact.gap
        else:
            assert result.gap is None
    text = plain(comparison_table(results))
    for part in (*names, "waiting slow", "memory fast", "variance", "seconds +"):
        assert part in text, part


def test_comparison_includes_an_allocator_without_a_plan() -> None:
    problem = replace(tight(), seconds=1e-9)
    results = {result.allocator: result for result in compare(problem, side_by_side(problem))}
    assert results["paper"].answer is None
    assert "more" in str(results["paper"].error)
    assert results["uniform-fp32"].answer is not None
    assert "none: " in plain(comparison_table(list(results.values())))


def test_single_change_names_the_reason_against_each_format() -> None:
    answer, reasons = answered(), set()
    for operator in answer.problem.classes["slow"].choices:
        steps = single_change(answer, operator)
        assert [step.fmt for step in steps] == ["int8", "bf16", "fp32"]
        for step in steps:
            plans = {**answer.plans, "slow": {**answer.plans["slow"], operator: step.fmt}}
            evaluation = evaluate_plan(answer.problem, plans)
            assert step.evaluation == evaluation
            assert step.seconds == evaluation.seconds - answer.evaluation.seconds
            assert step.variance == evaluation.variance - answer.evaluation.variance
            assert (
                step.computing
                == evaluation.classes["slow"].computing
                - answer.evaluation.classes["slow"].computing
            )
            assert step.exceeds == evaluation.exceeds(answer.problem)
            assert (step.why is Why.CHOSEN) == (answer.plans["slow"][operator] == step.fmt)
            reasons.add(step.why)
        text = plain(steps_table(steps))
        assert all(part in text for part in (operator, *(str(step.why) for step in steps)))
    assert {Why.CHOSEN, Why.BREAKS} <= reasons
    assert Why.BETTER not in reasons


def test_single_change_reports_a_missed_improvement() -> None:
    problem = alone("mlp")
    answer = what_if(answered(problem), dict.fromkeys(problem.classes["device"].choices, "int8"))
    steps = single_change(answer, next(iter(problem.classes["device"].choices)))
    assert {step.fmt: step.why for step in steps} == {
        "int8": Why.CHOSEN,
        "bf16": Why.BETTER,
        "fp32": Why.BETTER,
    }


def test_tied_operators_change_together() -> None:
    problem = fleet("mlp", times=PlainTimes)
    first, second = list(problem.classes["slow"].choices)[:2]
    answer = replace(answered(problem), problem=replace(problem, tied=[[first, second]]))
    both = {**answer.plans["slow"], first: "int8", second: "int8"}
    assert single_change(answer, second)[0].evaluation == evaluate_plan(
        problem, {**answer.plans, "slow": both}
    )


def test_what_if_reports_exceeded_limits() -> None:
    answer = answered()
    changed = what_if(answer, dict.fromkeys(answer.problem.classes["slow"].choices, "fp32"))
    assert changed.evaluation == evaluate_plan(answer.problem, changed.plans)
    assert set(changed.plans["slow"].values()) == {"fp32"}
    (note,) = changed.notes
    assert note.kind is PlanNoteKind.UNFIT
    assert note.numbers == changed.evaluation.exceeds(answer.problem)
    text = plain(changes_table(answer, changed))
    assert "exceeds limits: seconds +" in text
    assert "computing slow" in text
    assert what_if(answer, {}).evaluation == answer.evaluation
    assert "all limits are met" in plain(changes_table(answer, what_if(answer, {})))


def test_operators_and_devices_that_are_none() -> None:
    answer = answered()
    with pytest.raises(PlanError, match="no operator '0/linaer'") as caught:
        single_change(answer, "0/linaer")
    assert "did you mean '0/linear'" in str(caught.value)
    with pytest.raises(PlanError, match="which is dependent"):
        single_change(answer, "1/relu")
    with pytest.raises(PlanError, match="no plan was chosen for devices 'fast'"):
        single_change(answer, "0/linear", "fast")
    with pytest.raises(PlanError, match="do not ask for 'fp8'"):
        what_if(answer, {"0/linear": "fp8"})
    both = {name: replace(part, fixed_plan=None) for name, part in answer.problem.classes.items()}
    several = replace(answer, problem=replace(answer.problem, classes=both))
    with pytest.raises(PlanError, match="2 classes"):
        single_change(several, "0/linear")
    assert single_change(several, "0/linear", "fast")


def test_front_spans_the_fastest_and_the_least_variance_plan() -> None:
    answer = answered(replace(alone("mlp", times=NarrowIsFaster), seconds=1.0))
    front = pareto(answer.problem, MilpAllocator(), 7, answer)
    seconds = [point.evaluation.seconds for point in front.points]
    variances = [point.evaluation.variance for point in front.points]
    assert len(front.points) >= 2
    assert seconds == sorted(seconds)
    assert variances == sorted(variances, reverse=True)
    assert variances[-1] == 0
    assert set(front.uniform) == {"int8", "bf16", "fp32"}
    for other in [*front.uniform.values(), answer]:
        assert seconds[0] <= other.evaluation.seconds * (1 + 1e-9)
    text = plain(front_table(front))
    assert "uniform bf16" in text
    assert "chosen" in text
    with pytest.raises(PlanError, match="1 points"):
        pareto(answer.problem, MilpAllocator(), 1)
