"""The paper's allocator: what it answers keeps the limits, is no worse than a uniform plan, and the
same each time.
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
    """Returns a problem with limits that lie somewhere between those of the uniform plans, or just
    beyond them.
    """
    draw = random.Random(seed)
    known = [evaluate_plan(problem, plans) for plans in uniforms(problem).values()]

    def between(values: list[float]) -> float | None:
        low, high = min(values), max(values)
        return draw.choice([None, low, high, low + draw.uniform(-0.1, 1.1) * (high - low)])

    classes = dict(problem.classes)
    for name in problem.open:
        memory = between([float(each.classes[name].peak_bytes or 0) for each in known])
        classes[name] = replace(classes[name], memory=memory)
    return replace(problem, classes=classes, seconds=between([each.seconds for each in known]))


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
        known = [evaluate_plan(problem, plans) for plans in uniforms(problem).values()]
        fit = [each for each in known if not each.exceeds(problem)]
        if (answer := found_or_refused(problem)) is None:
            assert not fit
            continue
        assert answer.evaluation == evaluate_plan(problem, answer.plans)
        assert answer.fits
        assert all(answer.value <= each.value(problem) for each in fit)
        assert answer.plans == PrecisionRecovery().allocate(problem).plans
        for each, found in problem.classes.items():
            if found.fixed_plan is not None:
                assert answer.plans[each] == found.fixed_plan


def found_or_refused(problem: Problem) -> PlanResult | None:
    try:
        return PrecisionRecovery().allocate(problem)
    except PlanError as error:
        refused = error
    assert "more than allowed" in str(refused)
    assert refused.do
    return None


def test_greedy_plan_is_maximal() -> None:
    problem = fleet("mlp")
    problem = replace(problem, seconds=evaluate_plan(problem, problem.uniform()).seconds * 1.02)
    answer = PrecisionRecovery().allocate(problem)
    judge = PlanEvaluator(problem, answer.plans)
    part = problem.classes["slow"]
    for operator, known in part.choices.items():
        now = known.index(answer.plans["slow"][operator])
        for fmt in known[now + 1 : now + 2]:
            judge.set("slow", operator, fmt)
            assert not judge.fits()
            judge.undo()


def test_without_limits_everything_is_recovered() -> None:
    answer = PrecisionRecovery().allocate(alone("mlp"))
    assert answer.evaluation.variance == 0
    assert set(answer.plans["device"].values()) == {"fp32"}


def test_equal_blocks_are_searched_once_with_equal_starts() -> None:
    part = device_class("bert2")
    own = units(part)
    found = parts(part.graph, own)
    assert sorted(unit.operators for equal in found for block in equal for unit in block) == sorted(
        unit.operators for unit in own
    )
    assert {len(equal) for equal in found} == {1, 2}
    for equal in found:
        tried = 1
        for unit in equal[0]:
            tried *= len(unit.formats)
        assert tried <= TRIED
    problem = alone("bert2")
    start = initial(part, own, PlanEvaluator(problem, problem.uniform()), "device")
    for equal in found:
        assert len({tuple(start[unit.operators[0]] for unit in block) for block in equal}) == 1


def test_the_start_is_the_fastest_of_a_small_model() -> None:
    """All of it is one part, so that every plan is tried."""
    problem = alone("mlp")
    part = problem.classes["device"]
    start = initial(part, units(part), PlanEvaluator(problem, problem.uniform()), "device")
    judge = PlanEvaluator(problem, problem.uniform())
    draw = random.Random(0)
    others = [{op: draw.choice(known) for op, known in part.choices.items()} for _ in range(50)]
    fastest = judge.set_plans({"device": start}).seconds
    assert all(
        fastest <= judge.set_plans({"device": other}).seconds * (1 + 1e-12) for other in others
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
    narrow = next(op for op, known in part.choices.items() if "int8" in known)
    fixed = next(op for op, known in part.choices.items() if "int8" not in known)
    only = replace(part, formats=("int8", "bf16"))
    problem = replace(problem, classes={"device": replace(only)}, tied=[[narrow, fixed]])
    plans = PrecisionRecovery().allocate(problem).plans
    assert {plans["device"][op] for op in (narrow, fixed)} == {"bf16"}


def _layers(problem: Problem) -> list[list[str]]:
    known = problem.classes["slow"].choices
    return [[op for op in known if f"layer.{at}." in op] for at in (0, 1)]
