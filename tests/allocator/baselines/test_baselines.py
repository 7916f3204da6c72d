"""Uniform baseline: metrics equal the evaluator's, and exceeded limits are reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsync_fx import PlanError
from qsync_fx.allocator import PlanNoteKind, Problem, evaluate_plan
from qsync_fx.allocator.baselines import Uniform
from tests.support.planning.allocation_problems import alone, fleet


def hybrid(name: str, seed: int = 0) -> Problem:
    problem = fleet(name, seed=seed)
    return replace(problem, seconds=evaluate_plan(problem, problem.uniform()).seconds * 1.01)


ALLOCATORS = (Uniform(), Uniform("int8"), Uniform("fp32"))


@pytest.mark.parametrize("name", ["mlp", "checkpointed"])
def test_results_equal_the_evaluator(name: str) -> None:
    problem = hybrid(name)
    for allocator in ALLOCATORS:
        answer = allocator.allocate(problem)
        assert answer.evaluation == evaluate_plan(problem, answer.plans)
        assert answer.plans["fast"] == problem.classes["fast"].fixed_plan
        assert answer.allocator == allocator.name in str(answer)
        assert answer == allocator.allocate(problem)
        assert answer.fits == (PlanNoteKind.UNFIT not in {note.kind for note in answer.notes})


def test_plan_above_its_limits_is_marked() -> None:
    problem = fleet("mlp")
    wide = Uniform("fp32")
    problem = replace(problem, seconds=0.9 * wide.allocate(problem).evaluation.seconds)
    answer = wide.allocate(problem)
    assert set(answer.plans["slow"].values()) == {"fp32"}
    assert answer.evaluation.variance == 0
    (note,) = (note for note in answer.notes if note.kind is PlanNoteKind.UNFIT)
    assert note.numbers == answer.evaluation.exceeds(problem)
    assert note.numbers["seconds"] > 0
    impossible = replace(problem, seconds=1e-9)
    for allocator in ALLOCATORS:
        assert not allocator.allocate(impossible).fits, allocator.name


def test_uniform_is_the_best_that_fits() -> None:
    problem = fleet("mlp")
    assert Uniform().allocate(problem).evaluation.variance == 0
    problem = hybrid("mlp")
    answer = Uniform().allocate(problem)
    for fmt in ("int8", "bf16", "fp32"):
        other = Uniform(fmt).allocate(problem)
        assert {fmt} == set(other.plans["slow"].values())
        assert not other.fits or answer.value <= other.value
    with pytest.raises(PlanError, match="not all devices") as caught:
        Uniform("fp8").allocate(problem)
    assert "int8" in str(caught.value)


def test_one_device_is_a_cluster_too() -> None:
    problem = replace(alone("mlp"), least="seconds", variance=1e3)
    assert Uniform().allocate(problem).fits
