"""Baseline allocators of benchmarks: full precision, and recovery in other orders."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.support.baselines import FullPrecision, HessianGreedy, RandomGreedy
from qsync_fx import Sensitivity
from qsync_fx.allocator import Allocator, PlanNoteKind, Problem, evaluate_plan
from qsync_fx.allocator.recovery import PrecisionRecovery
from qsync_fx.predictor.replayer.cluster import Cluster, ClusterDevice
from tests.support.planning.allocation_problems import alone, drawn_sensitivity, fleet
from tests.support.planning.catalog_fleets import sized


def hybrid(name: str, seed: int = 0) -> Problem:
    problem = fleet(name, seed=seed)
    return replace(problem, seconds=evaluate_plan(problem, problem.uniform()).seconds * 1.01)


def allocators(problem: Problem) -> list[Allocator]:
    sensitivity = drawn_sensitivity(problem.classes["slow"].graph, 5)
    return [FullPrecision(), RandomGreedy(), RandomGreedy(1), HessianGreedy(sensitivity)]


@pytest.mark.parametrize("name", ["mlp", "checkpointed"])
def test_results_equal_the_evaluator(name: str) -> None:
    problem = hybrid(name)
    for allocator in allocators(problem):
        answer = allocator.allocate(problem)
        assert answer.evaluation == evaluate_plan(problem, answer.plans)
        assert answer.plans["fast"] == problem.classes["fast"].fixed_plan
        assert answer.allocator == allocator.name
        assert answer == allocator.allocate(problem)
        assert answer.fits == (PlanNoteKind.UNFIT not in {note.kind for note in answer.notes})


def test_full_precision_ignores_limits_and_marks_its_plan() -> None:
    problem = replace(fleet("mlp"), seconds=1e-9)
    answer = FullPrecision().allocate(problem)
    assert set(answer.plans["slow"].values()) == {"fp32"}
    assert answer.evaluation.variance == 0
    for allocator in allocators(problem):
        assert not allocator.allocate(problem).fits, allocator.name


def test_order_determines_the_widened_operators() -> None:
    """HessianGreedy equals PrecisionRecovery if both use omega of the first format, halved per
    wider format.
    """
    problem = hybrid("odd")
    part = problem.classes["slow"]
    halving = {
        op: {
            part.runs(op, fmt): 0.5**index
            for index, fmt in enumerate(formats)
            if part.runs(op, fmt) != "fp32"
        }
        for op, formats in part.choices.items()
    }
    base = {op: part.omega(op, formats[0]) for op, formats in part.choices.items()}
    halved = {
        op: {fmt: base[op] * share for fmt, share in shares.items()}
        for op, shares in halving.items()
    }
    same = replace(
        problem,
        classes={
            n: replace(p, sensitivity=Sensitivity("halved", "", halved))
            for n, p in problem.classes.items()
        },
    )
    assert (
        HessianGreedy(same.classes["slow"].sensitivity).allocate(problem).plans
        == PrecisionRecovery().allocate(same).plans
    )


def test_random_order_depends_on_the_seed() -> None:
    """The limit allows FP32 for one of two equal layers."""
    problem = Problem({"t4": sized("perceptron", "t4", 1024)}, Cluster({"t4": ClusterDevice()}))
    narrow, wide = (
        evaluate_plan(problem, problem.uniform(fmt)).seconds for fmt in ("fp16", "fp32")
    )
    problem = replace(problem, seconds=narrow + 0.7 * (wide - narrow))
    plans = [RandomGreedy(seed).allocate(problem).plans["t4"] for seed in range(6)]
    assert {plan["0/linear"] for plan in plans} == {plan["2/linear"] for plan in plans}
    assert len({tuple(plan.items()) for plan in plans}) > 1


def test_better_order_is_not_worse_in_total() -> None:
    ours, drawn = [], []
    for seed in range(6):
        problem = hybrid("mlp", seed)
        ours.append(PrecisionRecovery().allocate(problem).value)
        drawn.append(RandomGreedy(seed).allocate(problem).value)
    assert sum(ours) <= sum(drawn)


def test_one_device_is_a_cluster_too() -> None:
    problem = replace(alone("mlp"), least="seconds", variance=1e3)
    assert RandomGreedy().allocate(problem).fits
