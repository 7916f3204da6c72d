"""The exact allocator finds what brute force finds, and says so where there is nothing to find."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx import PlanError
from qsync_fx.allocator import PlanEvaluator, PlanNoteKind, Problem
from qsync_fx.allocator.milp import (
    build_and_solve,
    lagrangian_relaxation,
    milp_allocator,
    neighbour_terms,
)
from qsync_fx.allocator.milp.linear_program import LinearProgram
from qsync_fx.allocator.milp.milp_allocator import (
    MAX_ENUMERATED_PLANS,
    MilpAllocator,
    widen_operators,
)
from qsync_fx.allocator.milp.search import Incumbent, MilpSearch
from qsync_fx.allocator.recovery import PrecisionRecovery
from qsync_fx.predictor.memory import TrainingMemory
from qsync_fx.predictor.replayer.cluster import Buckets, Cluster, ClusterDevice, Network
from tests.support.planning.allocation_problems import PlainTimes
from tests.support.planning.drawn_graphs import LOSSES, device, every
from tests.support.planning.predicted_models import DrawnTimes
from tests.support.tiers import ALL, chosen

SETS = [("fp32", "bf16", "int8"), ("fp32", "bf16", "fp16"), ("fp32", "bf16", "int8", "fp16")]


def examples(few: int) -> int:
    """Returns how many examples the tier of this run draws."""
    return chosen([max(1, few // 2)], [4 * few], [10 * few])[0]


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    formats=st.sampled_from(SETS),
    tight=st.floats(0.0, 0.9),
    small=st.booleans(),
)
def test_least_variance_is_that_of_brute_force(
    seed: int, formats: tuple[str, ...], tight: float, small: bool
) -> None:
    part = device(seed, formats)
    cluster = Cluster(
        {"a": ClusterDevice(count=2)}, Network(1e6, 1e-5), Buckets(first_bytes=64, bytes=200)
    )
    problem = Problem({"a": part}, cluster)
    known = every(problem, "a")
    seconds = sorted(judged.seconds for _, judged in known)
    limit = seconds[int(tight * (len(seconds) - 1))]
    peaks = sorted(judged.classes["a"].peak_bytes or 0 for _, judged in known)
    memory = peaks[len(peaks) // 2] if small else None
    problem = replace(problem, seconds=limit, classes={"a": replace(part, memory=memory)})
    fitting = [judged.variance for _, judged in known if not judged.exceeds(problem)]
    if not fitting:
        with pytest.raises(PlanError, match=r"more than allowed|at once"):
            MilpAllocator().allocate(problem)
        return
    if memory is not None and len(known) > MAX_ENUMERATED_PLANS:
        return
    answer = MilpAllocator().allocate(problem)
    assert answer.fits
    assert answer.evaluation == PlanEvaluator(problem, answer.plans).evaluate()
    assert answer.evaluation.variance == pytest.approx(min(fitting), rel=1.1e-4)
    assert answer.bound is not None
    assert answer.bound <= min(fitting) * (1 + 1e-6)
    assert answer.gap is not None
    assert answer.gap <= 1.1e-4


@ALL
def test_memory_of_many_plans_is_near_that_of_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is not linear in what is chosen, so that a plan may be missed; none is taken
    that does not fit, none bounded away.
    """
    monkeypatch.setattr(milp_allocator, "MAX_ENUMERATED_PLANS", 0)
    best = 0
    for seed in range(examples(6)):
        part = replace(
            device(seed, SETS[2 * (seed % 2)]), training=TrainingMemory(loss=LOSSES[seed % 3])
        )
        problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
        known = every(problem, "a")
        peaks = sorted(judged.classes["a"].peak_bytes or 0 for _, judged in known)
        problem = replace(problem, classes={"a": replace(part, memory=peaks[len(peaks) // 3])})
        answer = MilpAllocator().allocate(problem)
        assert answer.fits
        assert answer.gap is not None
        assert (PlanNoteKind.RECKONED in {note.kind for note in answer.notes}) == (
            answer.gap > 1e-4
        )
        least = min(judged.variance for _, judged in known if not judged.exceeds(problem))
        assert answer.bound is not None
        assert answer.bound <= least * (1 + 1e-6)
        assert (
            answer.evaluation.variance <= PrecisionRecovery().allocate(problem).evaluation.variance
        )
        best += answer.evaluation.variance <= least * (1 + 2e-4)
    assert best >= examples(6) * 0.8


@pytest.mark.parametrize("seed", range(examples(3)))
def test_a_plan_that_is_ruled_out_leaves_the_next_best(seed: int) -> None:
    part = device(seed, SETS[0])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    known = sorted(every(problem, "a"), key=lambda one: one[1].variance)
    seconds = sorted(judged.seconds for _, judged in known)[len(known) // 2]
    problem = replace(problem, seconds=seconds)
    best = [judged.variance for _, judged in known if not judged.exceeds(problem)]
    search = MilpSearch(problem, 1e-7, 60.0)
    for variance in best[:4]:
        solution = search.solve_estimate_from(problem.uniform())
        assert solution.plans is not None
        assert search.evaluate(solution.plans).variance == pytest.approx(variance, rel=1e-6)
        assert solution.bound == pytest.approx(variance, rel=1e-6)
        limits = search.state.limits
        excluded = [*limits.without.get("a", ()), solution.plans["a"]]
        search.state.limits = replace(limits, without={"a": excluded})


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), formats=st.sampled_from(SETS), share=st.floats(0.0, 1.0))
def test_minimum_seconds_equal_brute_force(
    seed: int, formats: tuple[str, ...], share: float
) -> None:
    part = device(seed, formats)
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    known = every(problem, "a")
    budget = share * max(judged.variance for _, judged in known)
    problem = replace(problem, least="seconds", variance=budget)
    best = min(judged.seconds for _, judged in known if not judged.exceeds(problem))
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
    judge = PlanEvaluator(problem, problem.uniform())
    known = []
    for one in itertools.product(*first.choices.values()):
        for other in itertools.product(*second.choices.values()):
            plans = {
                "a": dict(zip(first.choices, one, strict=True)),
                "b": dict(zip(second.choices, other, strict=True)),
            }
            for name, asked in plans.items():
                for operator, fmt in asked.items():
                    if judge.plans[name][operator] != fmt:
                        judge.set(name, operator, fmt)
            known.append((judge.seconds, judge.variance))
    if least == "variance":
        limit = sorted(known)[int(tight * (len(known) - 1))][0]
        answer = MilpAllocator().allocate(replace(problem, seconds=limit))
        best = min(variance for seconds, variance in known if seconds <= limit * (1 + 1e-9))
        assert answer.evaluation.variance == pytest.approx(best, rel=1.1e-4)
    else:
        limit = tight * max(variance for _, variance in known)
        answer = MilpAllocator().allocate(replace(problem, least="seconds", variance=limit))
        best = min(seconds for seconds, variance in known if variance <= limit * (1 + 1e-9))
        assert answer.evaluation.seconds == pytest.approx(best, rel=1.1e-4)
    assert answer.fits


def test_times_that_follow_neighbours_are_learned_or_in_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = 0
    for seed in range(4):
        part = device(2 * seed, SETS[0], DrawnTimes)
        problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
        known = every(problem, "a")
        seconds = sorted(judged.seconds for _, judged in known)
        problem = replace(problem, seconds=seconds[len(seconds) // 2])
        best = min(judged.variance for _, judged in known if not judged.exceeds(problem))
        search = MilpSearch(problem, 1e-4, 60.0)
        search.iterate_with_restart(6)
        widen_operators(search)
        incumbent = search.state.incumbent
        assert incumbent is not None
        assert not incumbent.evaluation.exceeds(problem)
        assert search.state.is_approximate
        near += incumbent.evaluation.variance <= best * 1.5
        bounds = []
        with monkeypatch.context() as patch:
            for columns, splits in ((0, 0), (neighbour_terms.COLUMNS, 0), (10**9, 10**9)):
                patch.setattr(neighbour_terms, "COLUMNS", columns)
                patch.setattr(neighbour_terms, "SPLITS", splits)
                search.state.lower_bound = None
                bound = search.compute_lower_bound()
                assert bound is not None
                assert 0 <= bound <= best * (1 + 1e-6) + 1e-12, "what a solver takes for zero"
                bounds.append(bound)
            exact = MilpAllocator().allocate(problem)
        # All neighbours in the program, nothing is left to learn.
        assert bounds == sorted(bounds)
        assert bounds[-1] == pytest.approx(best, rel=1.1e-4)
        assert exact.evaluation.variance == pytest.approx(best, rel=1.1e-4)
        assert exact.gap is not None
        assert exact.gap <= 1e-4
        if len(known) <= MAX_ENUMERATED_PLANS:
            assert MilpAllocator().allocate(problem).evaluation.variance == pytest.approx(best)
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


def test_a_stopped_solve_without_plans_leaves_the_lower_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part = device(3, SETS[0], DrawnTimes)
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    search = MilpSearch(problem, 1e-4, 60.0)
    narrow = search.evaluator.set_plans(problem.uniform())
    search.state.incumbent = Incumbent(search.evaluator.plans, narrow)
    value = narrow.variance
    assert value > 0
    bound = search.state.lower_bound = value * (1 - 2e-4)
    stopped = build_and_solve.Solution(
        None, float("inf"), float("inf"), infeasible=False, stopped=True
    )
    monkeypatch.setattr(search, "solve_bound", lambda gap: stopped)
    search.tighten_bound()
    assert search.state.lower_bound == bound
    assert not search.is_within_gap()


@settings(max_examples=examples(3), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), formats=st.sampled_from(SETS), tight=st.floats(0.0, 0.9))
def test_lagrangian_prices_lead_to_the_brute_force_optimum(
    seed: int, formats: tuple[str, ...], tight: float
) -> None:
    """With several buckets, of which any may be what the step waits for; a choice at a time is made
    anew.
    """
    part = device(seed, formats)
    cluster = Cluster(
        {"a": ClusterDevice(count=2)}, Network(1e6, 1e-5), Buckets(first_bytes=64, bytes=200)
    )
    problem = Problem({"a": part}, cluster)
    known = every(problem, "a")
    problem = replace(
        problem, seconds=sorted(one.seconds for _, one in known)[int(tight * (len(known) - 1))]
    )
    best = min(judged.variance for _, judged in known if not judged.exceeds(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_and_solve, "LARGE", 0)
        patch.setattr(lagrangian_relaxation, "_FREE", 1)
        answer = MilpAllocator().allocate(problem)
    assert answer.fits
    assert answer.evaluation.variance == pytest.approx(best, rel=1.1e-4)
    assert answer.bound is not None
    assert answer.bound <= best * (1 + 1e-6)


def test_the_relaxed_program_first_is_as_near(monkeypatch: pytest.MonkeyPatch) -> None:
    part = device(3, SETS[2])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    slow = PlanEvaluator(problem, problem.uniform()).evaluate().seconds
    for share in (1.0, 1.05, 1.2):
        asked = replace(problem, seconds=slow * share)
        whole = MilpAllocator().allocate(asked)
        monkeypatch.setattr(build_and_solve, "LARGE", 0)
        relaxed = MilpAllocator().allocate(asked)
        monkeypatch.undo()
        assert relaxed.fits
        assert relaxed.gap is not None
        assert relaxed.gap <= 1.1e-4
        assert relaxed.evaluation.variance == pytest.approx(whole.evaluation.variance, rel=1.1e-4)


def test_search_is_deterministic() -> None:
    part = device(3, SETS[2])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    fast = PlanEvaluator(problem, problem.uniform()).evaluate().seconds
    problem = replace(problem, seconds=fast * 1.2)
    assert MilpAllocator().allocate(problem) == MilpAllocator().allocate(problem)


@pytest.mark.parametrize("enabled", [True, False])
def test_cycles_are_searched_for_afterwards_as_before(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, seen = device(3, SETS[2]), []
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    slow = PlanEvaluator(problem, problem.uniform()).evaluate().seconds
    monkeypatch.setattr(
        milp_allocator,
        "MilpSearch",
        lambda *asked: seen.append(gc.isenabled()) or MilpSearch(*asked),
    )
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        MilpAllocator().allocate(replace(problem, seconds=slow))
        assert gc.isenabled() == enabled
        with pytest.raises(PlanError):
            MilpAllocator().allocate(replace(problem, seconds=slow / 100))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, False]


def test_any_variance_is_no_limit() -> None:
    part = device(3, SETS[2])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}), least="seconds")
    free = MilpAllocator().allocate(replace(problem, variance=float("inf")))
    assert (free.plans, free.bound) == (
        (known := MilpAllocator().allocate(problem)).plans,
        known.bound,
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
    linear = [operator for operator, known in part.choices.items() if len(known) == 3]
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}), tied=(linear,))
    known = [
        judged
        for plan, judged in every(problem, "a")
        if len({plan[operator] for operator in linear}) == 1
    ]
    limit = sorted(judged.seconds for judged in known)[1]
    answer = MilpAllocator().allocate(replace(problem, seconds=limit))
    assert len({answer.plans["a"][operator] for operator in linear}) == 1
    assert answer.evaluation.variance == pytest.approx(
        min(judged.variance for judged in known if judged.seconds <= limit), rel=1.1e-4
    )


def test_infeasible_problem_names_the_feasible_limit() -> None:
    part = device(2, SETS[0])
    problem = Problem({"a": part}, Cluster({"a": ClusterDevice()}))
    known = [judged for _, judged in every(problem, "a")]
    fastest = min(judged.seconds for judged in known)
    smallest = min(judged.classes["a"].peak_bytes or 0 for judged in known)
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
