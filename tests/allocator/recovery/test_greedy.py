"""Precision recovery, the allocator of QSync: its plans meet the limits, are deterministic, and are
no worse than uniform plans.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from qsync_fx import PlanError
from qsync_fx.allocator import PlanEvaluator, PlanResult, Problem, evaluate_plan
from qsync_fx.allocator.problem import uniforms
from qsync_fx.allocator.recovery import TRIED, PrecisionRecovery, initial, parts, units
from tests.support import tiers
from tests.support.planning.allocation_problems import alone, device_class, fleet


def limited(problem: Problem, seed: int) -> Problem:
    """Return a problem with random limits between the uniform plans' metrics, or just beyond."""
    draw = random.Random(seed)
    evaluations = [evaluate_plan(problem, plans) for plans in uniforms(problem).values()]

    def between(values: list[float]) -> float | None:
        low, high = min(values), max(values)
        return draw.choice([None, low, high, low + draw.uniform(-0.1, 1.1) * (high - low)])

    classes = dict(problem.classes)
    for name in problem.open:
        memory = between(
            [float(evaluation.classes[name].peak_bytes or 0) for evaluation in evaluations]
        )
        classes[name] = replace(classes[name], memory=memory)
    return replace(
        problem,
        classes=classes,
        seconds=between([evaluation.seconds for evaluation in evaluations]),
    )


@pytest.mark.parametrize(
    "name", ["mlp", "tied", "odd", "checkpointed", pytest.param("bert2", marks=tiers.ALL)]
)
@pytest.mark.parametrize("make", [alone, fleet])
@pytest.mark.parametrize("least", ["variance", "seconds"])
def test_answers_keep_limits_and_are_no_worse_than_uniform_plans(
    name: str, make: type, least: str
) -> None:
    for seed in range(1 if name == "bert2" else 3):
        problem = replace(limited(make(name, seed=seed), seed), least=least)
        if least == "seconds":
            worst = max(
                evaluate_plan(problem, plans).variance for plans in uniforms(problem).values()
            )
            problem = replace(problem, variance=worst * random.Random(seed).random())
        evaluations = [evaluate_plan(problem, plans) for plans in uniforms(problem).values()]
        fit = [each for each in evaluations if not each.exceeds(problem)]
        if (answer := found_or_refused(problem)) is None:
            assert not fit
            continue
        assert answer.evaluation == evaluate_plan(problem, answer.plans)
        assert answer.fits
        assert all(answer.value <= each.value(problem) for each in fit)
        assert answer.plans == PrecisionRecovery().allocate(problem).plans
        for each, part in problem.classes.items():
            if part.fixed_plan is not None:
                assert answer.plans[each] == part.fixed_plan


def found_or_refused(problem: Problem) -> PlanResult | None:
    try:
        return PrecisionRecovery().allocate(problem)
    except PlanError as error:
        refusal = error
    assert "more than allowed" in str(refusal)
    assert refusal.do
    return None


def test_greedy_plan_is_maximal() -> None:
    problem = fleet("mlp")
    problem = replace(problem, seconds=evaluate_plan(problem, problem.uniform()).seconds * 1.02)
    answer = PrecisionRecovery().allocate(problem)
    evaluator = PlanEvaluator(problem, answer.plans)
    part = problem.classes["slow"]
    for operator, formats in part.choices.items():
        index = formats.index(answer.plans["slow"][operator])
        for fmt in formats[index + 1 : index + 2]:
            evaluator.set("slow", operator, fmt)
            assert not evaluator.fits()
            evaluator.undo()


def test_without_limits_everything_is_recovered() -> None:
    answer = PrecisionRecovery().allocate(alone("mlp"))
    assert answer.evaluation.variance == 0
    assert set(answer.plans["device"].values()) == {"fp32"}


def test_equal_blocks_are_searched_once_with_equal_starts() -> None:
    part = device_class("bert2")
    groups = units(part)
    blocks_of_parts = parts(part.graph, groups)
    assert sorted(
        unit.operators for equal in blocks_of_parts for block in equal for unit in block
    ) == sorted(unit.operators for unit in groups)
    assert {len(equal) for equal in blocks_of_parts} == {1, 2}
    for equal in blocks_of_parts:
        plans = 1
        for unit in equal[0]:
            plans *= len(unit.formats)
        assert plans <= TRIED
    problem = alone("bert2")
    start = initial(part, groups, PlanEvaluator(problem, problem.uniform()), "device")
    for equal in blocks_of_parts:
        assert len({tuple(start[unit.operators[0]] for unit in block) for block in equal}) == 1


def test_the_start_is_the_fastest_of_a_small_model() -> None:
    """The model is a single part, so all plans are enumerated."""
    problem = alone("mlp")
    part = problem.classes["device"]
    start = initial(part, units(part), PlanEvaluator(problem, problem.uniform()), "device")
    evaluator = PlanEvaluator(problem, problem.uniform())
    draw = random.Random(0)
    others = [{op: draw.choice(formats) for op, formats in part.choices.items()} for _ in range(50)]
    fastest = evaluator.set_plans({"device": start}).seconds
    assert all(
        fastest <= evaluator.set_plans({"device": other}).seconds * (1 + 1e-12) for other in others
    )


def test_tied_operators_get_one_format() -> None:
    problem = fleet("bert2")
    tied = [list(group) for group in zip(*_layers(problem), strict=True)]
    problem = replace(
        problem, tied=tied, seconds=evaluate_plan(problem, problem.uniform()).seconds * 1.05
    )
    answer = PrecisionRecovery().allocate(problem)
    assert answer.fits and tied
    for group in tied:
        assert len({answer.plans["slow"][operator] for operator in group}) == 1


def test_operators_without_a_common_format_are_not_tied() -> None:
    problem = alone("bert2")
    part = problem.classes["device"]
    narrow = next(op for op, formats in part.choices.items() if "int8" in formats)
    fixed = next(op for op, formats in part.choices.items() if "int8" not in formats)
    only = replace(part, formats=("int8", "bf16"))
    problem = replace(problem, classes={"device": replace(only)}, tied=[[narrow, fixed]])
    plans = PrecisionRecovery().allocate(problem).plans
    assert {plans["device"][op] for op in (narrow, fixed)} == {"bf16"}


def _layers(problem: Problem) -> list[list[str]]:
    operators = problem.classes["slow"].choices
    return [[op for op in operators if f"layer.{layer}." in op] for layer in (0, 1)]
