"""The MILP allocator against brute force, and its errors for infeasible limits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx import PlanError
from qsync_fx.allocator import PlanEvaluator, PlanNoteKind, Problem
from qsync_fx.allocator.milp import format_variables
from qsync_fx.allocator.milp.linear_program import LinearProgram
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.milp.search import MilpSearch
from qsync_fx.allocator.recovery import PrecisionRecovery
from qsync_fx.predictor.memory import TrainingMemory
from qsync_fx.predictor.replayer.cluster import Buckets, Cluster, ClusterDevice, Network
from tests.support.planning.allocation_problems import PlainTimes
from tests.support.planning.drawn_graphs import LOSSES, device, every
from tests.support.planning.predicted_models import DrawnTimes
from tests.support.tiers import ALL, chosen

SETS = [("fp32", "bf16", "int8"), ("fp32", "bf16", "fp16"), ("fp32", "bf16", "int8", "fp16")]


def examples(few: int) -> int:
    """Return the number of examples in the tier of this run."""
    return chosen([max(1, few // 2)], [4 * few], [10 * few])[0]


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    formats=st.sampled_from(SETS),
    tight=st.floats(0.0, 0.9),
)
def test_least_variance_is_that_of_brute_force(
    seed: int, formats: tuple[str, ...], tight: float
) -> None:
    part = device(seed, formats)
    cluster = Cluster(
        {"a": ClusterDevice(count=2)}, Network(1e6, 1e-5), Buckets(first_bytes=64, bytes=200)
    )
    problem = Problem({"a": part}, cluster)
    evaluations = every(problem, "a")
    seconds = sorted(evaluation.seconds for _, evaluation in evaluations)
    problem = replace(problem, seconds=seconds[int(tight * (len(seconds) - 1))])
    fitting = [
        evaluation.variance for _, evaluation in evaluations if not evaluation.exceeds(problem)
    ]
    answer = MilpAllocator().allocate(problem)
    assert answer.fits
    assert answer.evaluation == PlanEvaluator(problem, answer.plans).evaluate()
    assert answer.evaluation.variance == pytest.approx(min(fitting), rel=1.1e-4)
    assert answer.bound is not None
    assert answer.bound <= min(fitting) * (1 + 1e-6)
    assert answer.gap is not None
    assert answer.gap <= 1.1e-4


@ALL
def test_memory_of_many_plans_is_near_that_of_brute_force() -> None:
    """Peak memory is not linear in the choices, so the best plan may be missed. All plans fit, and
    bounds are valid.
    """
    best = 0
    for seed in range(examples(6)):
        part = replace(
            device(seed, SETS[2 * (seed % 2)]), training=TrainingMemory(loss=LOSSES[seed % 3])
        )
        problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
        evaluations = every(problem, "a")
        peaks = sorted(evaluation.classes["a"].peak_bytes or 0 for _, evaluation in evaluations)
        problem = replace(problem, classes={"a": replace(part, memory=peaks[len(peaks) // 3])})
        answer = MilpAllocator().allocate(problem)
        assert answer.fits
        assert answer.gap is not None
        assert (PlanNoteKind.RECKONED in {note.kind for note in answer.notes}) == (
            answer.gap > 1e-4
        )
        least = min(
            evaluation.variance for _, evaluation in evaluations if not evaluation.exceeds(problem)
        )
        assert answer.bound is not None
        assert answer.bound <= least * (1 + 1e-6)
        assert (
            answer.evaluation.variance <= PrecisionRecovery().allocate(problem).evaluation.variance
        )
        best += answer.evaluation.variance <= least * (1 + 2e-4)
    assert best >= examples(6) * 0.8


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), formats=st.sampled_from(SETS), share=st.floats(0.0, 1.0))
def test_minimum_seconds_equal_brute_force(
    seed: int, formats: tuple[str, ...], share: float
) -> None:
    part = device(seed, formats)
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    evaluations = every(problem, "a")
    budget = share * max(evaluation.variance for _, evaluation in evaluations)
    problem = replace(problem, least="seconds", variance=budget)
    best = min(
        evaluation.seconds for _, evaluation in evaluations if not evaluation.exceeds(problem)
    )
    answer = MilpAllocator().allocate(problem)
    assert answer.fits
    assert answer.evaluation.seconds == pytest.approx(best, rel=1.1e-4)
    assert answer.bound is not None
    assert answer.bound <= best * (1 + 1e-6)


@ALL
@settings(max_examples=examples(2), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    tight=st.floats(0.1, 0.9),
    least=st.sampled_from(["variance", "seconds"]),
)
def test_two_classes_equal_brute_force(seed: int, tight: float, least: str) -> None:
    first = device(seed - seed % 2, ("fp32", "bf16"))
    second = replace(first, times=PlainTimes(seed + 1), formats=("fp32", "int8"))
    cluster = Cluster(
        {"a": ClusterDevice(count=2), "b": ClusterDevice(slowdown=1.3)},
        Network(1e6, 1e-5),
        Buckets(first_bytes=64, bytes=200),
    )
    problem = Problem({"a": first, "b": second}, cluster)
    evaluator = PlanEvaluator(problem, problem.uniform())
    metrics = []
    for first_formats in itertools.product(*first.choices.values()):
        for second_formats in itertools.product(*second.choices.values()):
            plans = {
                "a": dict(zip(first.choices, first_formats, strict=True)),
                "b": dict(zip(second.choices, second_formats, strict=True)),
            }
            for name, plan in plans.items():
                for operator, fmt in plan.items():
                    if evaluator.plans[name][operator] != fmt:
                        evaluator.set(name, operator, fmt)
            metrics.append((evaluator.seconds, evaluator.variance))
    if least == "variance":
        limit = sorted(metrics)[int(tight * (len(metrics) - 1))][0]
        answer = MilpAllocator().allocate(replace(problem, seconds=limit))
        best = min(variance for seconds, variance in metrics if seconds <= limit * (1 + 1e-9))
        assert answer.evaluation.variance == pytest.approx(best, rel=1.1e-4)
    else:
        limit = tight * max(variance for _, variance in metrics)
        answer = MilpAllocator().allocate(replace(problem, least="seconds", variance=limit))
        best = min(seconds for seconds, variance in metrics if variance <= limit * (1 + 1e-9))
        assert answer.evaluation.seconds == pytest.approx(best, rel=1.1e-4)
    assert answer.fits


def test_times_that_follow_neighbours_are_learned_or_in_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = 0
    for seed in range(4):
        part = device(2 * seed, SETS[0], DrawnTimes)
        problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
        evaluations = every(problem, "a")
        seconds = sorted(evaluation.seconds for _, evaluation in evaluations)
        problem = replace(problem, seconds=seconds[len(seconds) // 2])
        best = min(
            evaluation.variance for _, evaluation in evaluations if not evaluation.exceeds(problem)
        )
        search = MilpSearch(problem, 1e-4, 60.0)
        search.iterate_to_fixed_point(6)
        search.widen_operators()
        incumbent = search.state.incumbent
        assert incumbent is not None
        assert not incumbent.evaluation.exceeds(problem)
        assert search.state.is_approximate
        near += incumbent.evaluation.variance <= best * 1.5
        bounds = []
        for columns in (0, 10**9):
            monkeypatch.setattr(format_variables, "COLUMNS", columns)
            search.compute_lower_bound()
            bound = search.state.lower_bound
            assert bound is not None
            assert 0 <= bound <= best * (1 + 1e-6) + 1e-12, (
                "the lower bound is at most the optimum, within the solver's tolerance"
            )
            bounds.append(bound)
        exact = MilpAllocator().allocate(problem)
        # With the states of all neighbours in the program, times are exact.
        assert bounds == sorted(bounds)
        assert bounds[-1] == pytest.approx(best, rel=1.1e-4)
        assert exact.evaluation.variance == pytest.approx(best, rel=1.1e-4)
        assert exact.gap is not None
        assert exact.gap <= 1e-4
    assert near >= 2


def test_interrupted_search_reports_a_valid_bound() -> None:
    part = device(3, SETS[2])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    slow = PlanEvaluator(problem, problem.uniform()).evaluate().seconds
    answer = MilpAllocator(seconds=0.0).allocate(replace(problem, seconds=slow))
    best = MilpAllocator().allocate(replace(problem, seconds=slow))
    assert answer.fits
    assert PlanNoteKind.STOPPED in {note.kind for note in answer.notes}
    assert answer.bound is not None
    assert answer.bound <= best.evaluation.variance * (1 + 1e-9)
    assert answer.evaluation.variance >= best.evaluation.variance * (1 - 1e-4)


def test_search_is_deterministic() -> None:
    part = device(3, SETS[2])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    fast = PlanEvaluator(problem, problem.uniform()).evaluate().seconds
    problem = replace(problem, seconds=fast * 1.2)
    assert MilpAllocator().allocate(problem) == MilpAllocator().allocate(problem)


def test_any_variance_is_no_limit() -> None:
    part = device(3, SETS[2])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}), least="seconds")
    free = MilpAllocator().allocate(replace(problem, variance=float("inf")))
    assert (free.plans, free.bound) == (
        (unlimited := MilpAllocator().allocate(problem)).plans,
        unlimited.bound,
    )
    assert free.gap is not None
    assert free.gap <= 1e-4


def test_a_row_without_a_number_is_refused() -> None:
    program = LinearProgram()
    first = program.variable(1.0)
    with pytest.raises(ValueError, match="nan"):
        program.row({first: 1.0}, most=float("nan"))


def test_tied_operators_get_one_format() -> None:
    part = device(1, SETS[0])
    linear = [operator for operator, candidates in part.choices.items() if len(candidates) == 3]
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}), tied=(linear,))
    candidates = [
        evaluation
        for plan, evaluation in every(problem, "a")
        if len({plan[operator] for operator in linear}) == 1
    ]
    limit = sorted(evaluation.seconds for evaluation in candidates)[1]
    answer = MilpAllocator().allocate(replace(problem, seconds=limit))
    assert len({answer.plans["a"][operator] for operator in linear}) == 1
    assert answer.evaluation.variance == pytest.approx(
        min(evaluation.variance for evaluation in candidates if evaluation.seconds <= limit),
        rel=1.1e-4,
    )


def test_infeasible_problem_names_the_feasible_limit() -> None:
    part = device(2, SETS[0])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    evaluations = [evaluation for _, evaluation in every(problem, "a")]
    fastest = min(evaluation.seconds for evaluation in evaluations)
    smallest = min(evaluation.classes["a"].peak_bytes or 0 for evaluation in evaluations)
    with pytest.raises(PlanError, match=r"a step takes .* at least") as error:
        MilpAllocator().allocate(replace(problem, seconds=fastest / 2))
    assert f"{fastest * 1e3:.4g} ms" in str(error.value.do)
    with pytest.raises(PlanError, match=r"'a' takes .* at least") as error:
        MilpAllocator().allocate(
            replace(problem, classes={"a": replace(part, memory=smallest / 2)})
        )
    assert f"{smallest / 1e6:.4g} MB" in str(error.value.do)
    narrow = replace(part, formats=("bf16", "int8"))
    with pytest.raises(PlanError, match=r"variance is .* at least"):
        MilpAllocator().allocate(
            Problem({"a": narrow}, problem.cluster, least="seconds", variance=0.0)
        )
