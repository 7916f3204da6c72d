"""Plan evaluator: metrics equal the replayer's, the memory model's and the sensitivity map's, also
after changes.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import qsync_fx
from qsync_fx import Plan, PlanError
from qsync_fx.allocator import PlanEvaluator, Problem, evaluate_plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import anchored_bytes, step_memory
from qsync_fx.predictor.memory.peak_memory import Anchor
from qsync_fx.timeline.device_profiles import Profiled
from tests.support.planning.allocation_problems import alone, device_class, fleet
from tests.support.planning.peaks import most_bytes


class Known:
    def __init__(self, problem: Problem, name: str) -> None:
        self.graph, self._times = problem.classes[name].graph, problem.classes[name].times

    def times(self) -> object:
        return self._times


def drawn(problem: Problem, seed: int) -> dict[str, dict[str, str]]:
    draw = random.Random(seed)
    return {
        name: dict(
            part.fixed_plan or {op: draw.choice(formats) for op, formats in part.choices.items()}
        )
        for name, part in problem.classes.items()
    }


@pytest.mark.parametrize("name", ["mlp", "checkpointed", "odd"])
def test_evaluation_equals_replay(name: str) -> None:
    problem = fleet(name)
    plans = drawn(problem, 1)
    evaluation = evaluate_plan(problem, plans)
    profiles: dict[str, Profiled] = {name: Known(problem, name) for name in problem.classes}  # type: ignore[dict-item, misc]
    device_plans = {name: Plan(operators=plan) for name, plan in plans.items()}
    timeline = qsync_fx.replay(device_plans, profiles, cluster=problem.cluster)
    assert evaluation.seconds == timeline.seconds
    for name, metrics in evaluation.classes.items():
        part = problem.classes[name]
        assert metrics.waiting == timeline.waiting[name]
        assert metrics.sending == timeline.sending[name]
        assert metrics.peak_bytes == most_bytes(states(part.graph, plans[name]), part.training)
        assert metrics.variance == pytest.approx(
            sum(part.sensitivity.of(op, part.runs(op, fmt)) for op, fmt in plans[name].items())
        )
    # Each class has two of four devices; the mean of four divides their variance by 16.
    assert evaluation.variance == pytest.approx((2 * evaluation.classes["slow"].variance) / 16)


def test_changes_and_changes_undone_are_as_a_new_judge() -> None:
    problem, draw = fleet("mlp"), random.Random(0)
    evaluator = PlanEvaluator(problem, drawn(problem, 2))
    choices = problem.classes["slow"].choices
    for _ in range(20):
        operator = draw.choice(list(choices))
        evaluator.set("slow", operator, draw.choice(choices[operator]))
        if draw.random() < 0.4:
            evaluator.undo()
        assert evaluator.evaluate() == evaluate_plan(problem, evaluator.plans)
    other = drawn(problem, 3)
    assert evaluator.set_plans(other) == evaluate_plan(problem, other)
    assert evaluator.plans == other


def test_limits_are_met_or_reported_as_exceeded() -> None:
    problem = alone("mlp")
    plans = problem.uniform()
    evaluation = evaluate_plan(problem, plans)
    assert not evaluation.exceeds(problem)
    peak = evaluation.classes["device"].peak_bytes
    assert peak
    tight = replace(
        problem,
        seconds=evaluation.seconds / 2,
        variance=evaluation.variance,
        classes={"device": replace(problem.classes["device"], memory=peak - 10)},
    )
    assert evaluation.exceeds(tight) == {
        "seconds": pytest.approx(evaluation.seconds / 2),
        "memory device": 10,
    }
    assert not PlanEvaluator(tight, plans).fits()
    assert PlanEvaluator(replace(tight, seconds=None, classes=problem.classes), plans).fits()


def test_measured_peak_replaces_the_predicted_one() -> None:
    problem = alone("mlp")
    part = problem.classes["device"]
    measured = part.uniform("fp32")
    near = {**measured, next(iter(measured)): "bf16"}
    anchor = Anchor(states(part.graph, measured), 12345)
    corrected = replace(problem, classes={"device": replace(part, anchors=(anchor,))})
    for plan in (measured, near):
        plain, corrected_peak = (
            evaluate_plan(variant, {"device": plan}).classes["device"].peak_bytes
            for variant in (problem, corrected)
        )
        operator_states = states(part.graph, plan)
        correction = (
            anchored_bytes(operator_states, [anchor], part.training)
            - step_memory(operator_states, part.training).step_bytes
        )
        assert bool(correction) is (plan is measured)
        assert plain is not None and corrected_peak == plain + correction


def test_equivalent_formats_of_an_operator_are_one_choice() -> None:
    part = device_class("bert2", ("fp32", "bf16", "int8", "fp8"))
    norms = [op.id for op in part.graph.operators if op.kind == "adjustable" and "norm" in op.row]
    assert norms
    for operator in norms:
        assert part.choices[operator] == ("bf16", "fp32")
        assert part.uniform("int8")[operator] == "bf16"
    assert {("int8", "fp8", "bf16", "fp32"), ("fp8", "int8", "bf16", "fp32")} & set(
        part.choices.values()
    )
    for fmt in part.formats:
        assert states(part.graph, part.uniform(fmt)) == states(
            part.graph, dict.fromkeys(part.choices, fmt)
        )


def test_problems_that_are_none() -> None:
    part = device_class("mlp")
    with pytest.raises(PlanError, match="not made for plans with"):
        replace(part, graph=replace(part.graph, formats=("fp32",)))
    with pytest.raises(PlanError, match="cannot take"):
        replace(part, memory=float("nan"))
    with pytest.raises(PlanError, match="memory of a step is unknown"):
        replace(part, memory=1e9, training=None)
    with pytest.raises(PlanError, match="open to choice"):
        Problem({"device": replace(part, fixed_plan=part.uniform("fp32"))}, alone("mlp").cluster)
