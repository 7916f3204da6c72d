"""Joint plans of batches and formats, against brute force and against plans of one choice only."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx import OptionError, PlanError, find_plan
from qsync_fx.allocator import DeviceClass, Evaluation, PlanEvaluator, Problem
from qsync_fx.allocator.baselines import DynamicBatches, full
from qsync_fx.allocator.evaluator import evaluate_plan, recomputing, resized
from qsync_fx.allocator.joint_batches import BUDGETS, GAP, JointBatches
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.options import Options
from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.predictor.cost_mapper.times import Seconds
from qsync_fx.predictor.memory import TrainingMemory
from qsync_fx.predictor.replayer.cluster import Buckets, Cluster, ClusterDevice, Network, Node
from tests.support.planning.allocation_problems import PlainTimes
from tests.support.planning.catalog_fleets import of_catalog, symbolic
from tests.support.planning.drawn_graphs import device
from tests.support.planning.predicted_models import DrawnTimes
from tests.support.tiers import ALL, chosen

MEASURED = 3
brute_force = settings(
    max_examples=chosen([3], [4], [20])[0],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class PerSample(PlainTimes):
    """Random operator times: a constant part plus a part proportional to the batch."""

    def __init__(self, seed: int, batch: int) -> None:
        super().__init__(seed)
        self.batch = batch

    def _drawn(self, *key: str) -> Seconds:
        result = DrawnTimes._drawn(self, *key)
        factor = 0.5 + self.batch / MEASURED
        return Seconds(result.forward * factor, result.backward * factor)


def with_batch(part: DeviceClass, seed: int, batch: int) -> DeviceClass:
    sensitivity = part.sensitivity.at_batch(MEASURED, batch)
    return replace(part, times=PerSample(seed, batch), sensitivity=sensitivity)


def drawn(
    seed: int, slowdown: float, training: TrainingMemory | None = None
) -> tuple[Problem, JointBatches]:
    part = replace(device(seed, ("fp32", "int8")), training=training)
    classes = {"a": with_batch(part, seed, MEASURED), "b": with_batch(part, seed + 1, MEASURED)}
    devices = {
        "a": ClusterDevice(count=2, batch=MEASURED),
        "b": ClusterDevice(slowdown=slowdown, batch=MEASURED, delay=1e-4),
    }
    cluster = Cluster(devices, Network(1e6, 1e-5), Buckets(first_bytes=64, bytes=200))
    seeds = {"a": seed, "b": seed + 1}
    return Problem(classes, cluster), JointBatches(
        lambda name, batch: with_batch(part, seeds[name], batch)
    )


def every_joint_plan(problem: Problem, joint: JointBatches) -> list[Evaluation]:
    """Return the evaluations of all plans, for all batches of one global batch and all memory
    budgets of class a.
    """
    result = []
    for first, budget in itertools.product((1, 2, 3, 4), (1.0, *joint.budgets)):
        batches = {"a": first, "b": 3 * MEASURED - 2 * first}
        devices = {
            name: replace(item, batch=batches[name])
            for name, item in problem.cluster.devices.items()
        }
        classes = {name: joint.resized(name, batch) for name, batch in batches.items()}
        limited = replace(classes["a"], memory=problem.classes["a"].memory)
        classes["a"] = recomputing(limited, budget)
        cluster = replace(problem.cluster, devices=devices)
        sized = replace(problem, classes=classes, cluster=cluster)
        evaluator = PlanEvaluator(sized, sized.uniform())
        choices = {name: part.choices for name, part in classes.items()}
        for picked in itertools.product(
            *(itertools.product(*by.values()) for by in choices.values())
        ):
            plans = {
                name: dict(zip(by, formats, strict=True))
                for (name, by), formats in zip(choices.items(), picked, strict=True)
            }
            result.append(evaluator.set_plans(plans))
    return result


@brute_force
@given(
    seed=st.integers(0, 10**5).map(lambda number: 14 * number + 2 * (number % 2)),
    tight=st.floats(0.0, 0.15),
    slowdown=st.sampled_from([1.0, 1.7]),
    least=st.sampled_from(["variance", "seconds"]),
)
def test_joint_plan_is_that_of_brute_force(
    seed: int, tight: float, slowdown: float, least: str
) -> None:
    # Seeds of two graphs of three layers, since tracing is slow.
    problem, joint = drawn(seed, slowdown)
    evaluations = every_joint_plan(problem, joint)
    if least == "variance":
        seconds = sorted(evaluation.seconds for evaluation in evaluations)
        problem = replace(problem, seconds=seconds[int(tight * (len(seconds) - 1))])
    else:
        budget = tight * max(evaluation.variance for evaluation in evaluations)
        problem = replace(problem, least="seconds", variance=budget)
    best = min(
        evaluation.value(problem) for evaluation in evaluations if not evaluation.exceeds(problem)
    )
    answer = joint.allocate(problem)
    assert answer.fits
    assert sum(answer.batches[name] * count for name, count in (("a", 2), ("b", 1))) == 9
    assert answer.evaluation == evaluate_plan(answer.problem, answer.plans)
    assert answer.bound is not None
    assert answer.bound <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= answer.value <= best / (1 - GAP) * (1 + 1e-6)
    assert answer.gap is not None
    assert answer.gap <= GAP * (1 + 1e-6)


@brute_force
@given(
    seed=st.integers(0, 10**5).map(lambda number: 14 * number + 2 * (number % 2)),
    tight=st.floats(0.0, 0.5),
    share=st.floats(0.0, 1.0),
)
def test_joint_plan_with_recomputation_is_that_of_brute_force(
    seed: int, tight: float, share: float
) -> None:
    problem, joint = drawn(seed, 1.7, TrainingMemory())
    evaluations = every_joint_plan(problem, replace(joint, budgets=(0.5,)))
    peaks = [evaluation.classes["a"].peak_bytes or 0 for evaluation in evaluations]
    limit = min(peaks) + share * (max(peaks) - min(peaks))
    seconds = sorted(
        evaluation.seconds
        for evaluation, peak in zip(evaluations, peaks, strict=True)
        if peak <= limit
    )
    limited = replace(problem.classes["a"], memory=limit)
    problem = replace(
        problem,
        classes={**problem.classes, "a": limited},
        seconds=seconds[int(tight * (len(seconds) - 1))],
    )
    best = min(item.variance for item in evaluations if not item.exceeds(problem))
    answer = replace(joint, budgets=(0.5,)).allocate(problem)
    assert answer.fits
    assert answer.evaluation == evaluate_plan(answer.problem, answer.plans)
    assert answer.bound is not None
    assert answer.bound <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= answer.value <= best / (1 - GAP) * (1 + 1e-6)
    try:
        alone = joint.allocate(problem)
    except PlanError:
        return
    assert answer.value <= alone.value


def test_no_joint_plan_in_time_is_an_error() -> None:
    problem, joint = drawn(0, 1.0)
    least = min(item.seconds for item in every_joint_plan(problem, joint))
    with pytest.raises(PlanError, match="within the limits"):
        joint.allocate(replace(problem, seconds=least * 0.9))


def catalog(name: str, batch: int) -> tuple[Problem, JointBatches]:
    problem = of_catalog(name, batch, count=16)
    return problem, JointBatches(
        lambda device, size: resized(problem.classes[device], symbolic(name, device), size)
    )


@pytest.mark.parametrize(
    "name", ["perceptron", pytest.param("resnet", marks=ALL), pytest.param("bert", marks=ALL)]
)
def test_joint_plan_is_never_worse_than_a_plan_of_one_choice(name: str) -> None:
    problem, joint = catalog(name, 128)
    for plans in (Problem.uniform, full):
        balanced = DynamicBatches(joint.resized, plans).allocate(problem)
        limited = replace(problem, seconds=balanced.evaluation.seconds)
        result = joint.allocate(limited)
        assert result.fits
        assert result.evaluation.variance <= balanced.evaluation.variance
    equal = replace(problem, seconds=evaluate_plan(problem, problem.uniform()).seconds)
    result = joint.allocate(equal)
    assert result.fits
    assert result.evaluation.variance <= MilpAllocator().allocate(equal).evaluation.variance
    budget = evaluate_plan(problem, problem.uniform("fp16")).variance
    limited = replace(problem, least="seconds", variance=budget)
    result = joint.allocate(limited)
    assert result.fits
    alone = (
        MilpAllocator().allocate(limited),
        DynamicBatches(joint.resized).allocate(limited),
    )
    assert result.evaluation.seconds <= min(answer.evaluation.seconds for answer in alone)


def test_memory_of_a_class_with_a_fixed_plan_limits_its_batch() -> None:
    problem, joint = catalog("perceptron", 64)
    batches = joint.allocate(problem).batches
    name = max(batches, key=lambda key: batches[key])
    part, peak = (
        problem.classes[name],
        evaluate_plan(problem, full(problem)).classes[name].peak_bytes,
    )
    assert batches[name] > 64 and peak is not None
    part = replace(part, fixed_plan=part.uniform(part.widest), memory=peak)
    limited = replace(problem, classes={**problem.classes, name: part})
    answer = joint.allocate(limited)
    assert answer.fits and answer.batches[name] <= 64


def test_plan_carries_its_batches() -> None:
    problem, joint = catalog("perceptron", 64)
    answer = joint.allocate(replace(problem, seconds=math.inf))
    plan = answer.as_plan()
    assert isinstance(plan, ClusterPlan)
    assert dict(plan.batches) == dict(answer.batches)
    assert sum(answer.batches.values()) == 128
    for name, batch in answer.batches.items():
        assert answer.problem.cluster.devices[name].batch == batch
        assert f"{name}: the batch size is planned: batch {batch}, before 64" in str(answer)


def test_batches_stay_within_the_request() -> None:
    problem, joint = catalog("perceptron", 64)
    seconds = evaluate_plan(problem, problem.uniform()).seconds
    limited = replace(problem, seconds=seconds)
    answer = replace(joint, min_batch=40).allocate(limited)
    assert min(answer.batches.values()) >= 40
    # Batches in proportion to speed are below 40 on a T4; the default target is feasible anyway.
    least = replace(joint, min_batch=40)
    assert min(DynamicBatches(joint.resized).allocate(problem).batches.values()) < 40
    target = least.balanced_seconds(problem)
    assert least.allocate(replace(problem, seconds=target)).fits
    wider = replace(joint, samples=(2048, 4096)).allocate(limited)
    samples = 16 * sum(wider.batches.values())
    assert 2048 <= samples <= 4096
    assert samples / wider.evaluation.seconds >= 2048 / seconds * (1 - 1e-9)
    assert wider.evaluation.variance <= joint.allocate(limited).evaluation.variance
    with pytest.raises(OptionError, match="no step has"):
        replace(joint, min_batch=65).allocate(limited)


def test_recomputation_makes_room_for_wider_formats(tmp_path: Path) -> None:
    problem = of_catalog("bert", 64, count=16)
    part = problem.classes["t4"]
    alone = evaluate_plan(problem, problem.uniform("fp16"))
    limit = 0.9 * (alone.classes["t4"].peak_bytes or 0)
    classes = {**problem.classes, "t4": replace(part, memory=limit)}
    limited = replace(problem, classes=classes, seconds=1.1 * alone.seconds)
    joint = JointBatches(lambda name, _: classes[name], given_batches=True)
    with pytest.raises(PlanError):
        joint.allocate(limited)
    answer = replace(joint, budgets=BUDGETS).allocate(limited)
    assert answer.fits and not answer.batches
    assert answer.memory_budgets.keys() == {"t4"}
    assert "t4: activations are recomputed, as memory limits" in str(answer)
    answer.save(tmp_path / "plan.json")
    options = Options.parse({"plan": tmp_path / "plan.json", "device_class": "t4"})
    assert options.active_memory_budget == answer.memory_budgets["t4"]


def test_one_device_needs_no_batch_to_recompute() -> None:
    part = of_catalog("bert", 64).classes["t4"]
    cluster = Cluster({"t4": ClusterDevice()}, Network(1e9, 0.0))
    peak = evaluate_plan(Problem({"t4": part}, cluster), {"t4": part.uniform("fp16")}).classes
    limit = 0.9 * (peak["t4"].peak_bytes or 0)
    problem = Problem({"t4": replace(part, memory=limit)}, cluster, "seconds", variance=1e9)
    answer = JointBatches(
        lambda name, _: problem.classes[name], budgets=BUDGETS, given_batches=True
    ).allocate(problem)
    assert answer.fits
    assert isinstance(plan := answer.as_plan(), ClusterPlan)
    assert dict(plan.memory_budgets) == dict(answer.memory_budgets)


def test_find_plan_plans_batches() -> None:
    problem = of_catalog("perceptron", 64, count=16)
    profiles: Any = {name: part.times for name, part in problem.classes.items()}
    arguments: dict[str, Any] = {
        "sensitivity": problem.classes["t4"].sensitivity,
        "progress": False,
        "resized": lambda part, batch: resized(
            part, symbolic("perceptron", part.graph.device), batch
        ),
    }
    answer = find_plan(profiles, problem.cluster, batch="global", **arguments)
    assert 16 * sum(answer.batches.values()) == 2048
    joint = catalog("perceptron", 64)[1]
    # By default no step is longer than with batches balanced in the narrowest formats.
    assert answer.evaluation.seconds <= joint.balanced_seconds(problem) * (1 + 1e-6)
    assert answer.fits
    margin = find_plan(
        profiles, problem.cluster, batch="global", margin=0.05, target=1.0, **arguments
    )
    assert dict(margin.batches) == {
        name: item.batch for name, item in margin.problem.cluster.devices.items()
    }
    assert margin.evaluation == evaluate_plan(margin.problem, margin.plans)
    for wrong, where in (
        ({"batch": (4, 2.0)}, "batch"),
        ({"batch": "global", "allocator": "paper"}, "allocator"),
        ({"batch": "global", "resized": None}, "batch"),
    ):
        with pytest.raises(OptionError) as caught:
            find_plan(profiles, problem.cluster, **arguments | wrong)
        assert caught.value.where == where


def test_codecs_are_planned_with_batches() -> None:
    problem = of_catalog("perceptron", 64, count=16, bandwidth=1e9)
    profiles: Any = {name: part.times for name, part in problem.classes.items()}
    parts = problem.classes["t4"].sensitivity
    gradients = {p.path: {"qsgd8": 1e-9} for p in problem.classes["t4"].graph.parameters}
    arguments: dict[str, Any] = {
        "sensitivity": replace(parts, gradients=gradients),
        "progress": False,
        "objective": "fastest",
        "budget": 1e9,
        "resized": lambda part, batch: resized(
            part, symbolic("perceptron", part.graph.device), batch
        ),
    }
    results = {
        (batch, codecs): find_plan(
            profiles, problem.cluster, batch=batch, codecs=codecs, **arguments
        )
        for batch in (None, "global")
        for codecs in ((), ("qsgd8",))
    }
    joint = results["global", ("qsgd8",)]
    assert set(joint.codecs.values()) == {"qsgd8"}
    assert 16 * sum(joint.batches.values()) == 2048
    assert joint.evaluation == evaluate_plan(joint.problem, joint.plans, joint.evaluation.codecs)
    for result in results.values():
        assert joint.bound is not None and joint.bound <= result.evaluation.seconds
        assert joint.evaluation.seconds <= result.evaluation.seconds * (1 + 1e-3)
    plan = joint.as_plan()
    assert isinstance(plan, ClusterPlan)
    assert plan.codecs and plan.batches
    devices = {
        name: replace(device, node=Node(4, 1e6)) for name, device in problem.cluster.devices.items()
    }
    inside = find_plan(
        profiles,
        replace(problem.cluster, devices=devices),
        batch="global",
        codecs=("qsgd8",),
        inside_codecs=("qsgd8",),
        **arguments,
    )
    assert set(inside.codecs.values()) == {"qsgd8/qsgd8"} and inside.batches
