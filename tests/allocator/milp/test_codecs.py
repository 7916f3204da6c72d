"""Codecs of gradient buckets, optimized jointly with operator formats, against brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from qsync_fx import PlanError
from qsync_fx.allocator import DeviceClass, Evaluation, PlanEvaluator, Problem
from qsync_fx.allocator.codec_choice import CodecSearchSpace
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.communication.codec_cost_model import of_copy
from qsync_fx.predictor.replayer.cluster import (
    Buckets,
    Cluster,
    ClusterDevice,
    Exchange,
    Network,
    Node,
)
from tests.support.planning.allocation_problems import PlainTimes, device_class
from tests.support.planning.predicted_models import DrawnTimes
from tests.support.tiers import chosen

CODECS = ("fp32", "qsgd8", "qsgd2")
LEVELS = ("fp32", "qsgd2", "qsgd2/qsgd8")
SCALE = {
    "fp16": 1e-4,
    "bf16": 1e-3,
    "1bit*": 3.0,
    "qsgd16": 1e-6,
    "qsgd8": 0.02,
    "qsgd4": 0.4,
    "qsgd2": 4.0,
}


def with_gradients(part: DeviceClass, seed: int) -> DeviceClass:
    """Return a class of devices whose sensitivity includes codec variances."""
    draw = random.Random(f"gradients {seed}")
    gradients = {}
    for parameter in part.graph.parameters:
        scale = draw.lognormvariate(0, 1)
        gradients[parameter.path] = {codec: scale * share for codec, share in SCALE.items()}
    return replace(part, sensitivity=replace(part.sensitivity, gradients=gradients))


def drawn(seed: int, classes: str, times: type[DrawnTimes] = PlainTimes) -> Problem:
    """Return a problem in which communication and computation take similar times. "kept" adds a
    class with a fixed plan, "two" a second class to plan.
    """
    draw = random.Random(f"codecs {seed}")
    slow = with_gradients(device_class("mlp", ("fp32", "bf16"), seed, times), seed)
    parts, devices = (
        {"slow": slow},
        {"slow": ClusterDevice(count=draw.choice([2, 3]), slowdown=1.5, delay=1e-5)},
    )
    if classes != "one":
        other = with_gradients(device_class("mlp", ("fp32", "bf16"), seed + 1, times), seed)
        parts["fast"] = (
            replace(other, fixed_plan=other.uniform("fp32")) if classes == "kept" else other
        )
        devices["fast"] = ClusterDevice(count=2)
    numels = [parameter.numel * 4 for parameter in slow.graph.parameters]
    cluster = Cluster(devices, Network(1e12, 1e-9), Buckets(1, max(numels) + 1))
    problem = Problem(parts, cluster)
    seconds = PlanEvaluator(problem, problem.uniform()).seconds
    bandwidth = sum(numels) / seconds * draw.uniform(0.4, 4)
    coding = CodecSearchSpace(CODECS, of_copy(bandwidth * draw.choice([1, 10, 100]), "drawn"))
    load = {"busy": draw.choice([0.0, 0.7]), "coding": draw.choice([None, 0.4])}
    network = Network(bandwidth, seconds * 1e-3, **load)  # type: ignore[arg-type]
    return replace(problem, cluster=replace(cluster, network=network), coding=coding)


def in_nodes(problem: Problem, seed: int) -> Problem:
    """Return the problem with twice the ranks, two per node, and codecs of two levels.

    A table gives the times of exchanges inside nodes, link bandwidths those between nodes.
    """
    draw, network = random.Random(f"nodes {seed}"), problem.cluster.network
    assert network is not None and network.bandwidth is not None and problem.coding is not None
    ratio = network.bandwidth * draw.choice([0.3, 1, 100])
    table = [(2.0**power, 2.0**power / ratio + network.latency) for power in range(4, 24, 2)]
    network = replace(network, exchanges=[Exchange("point_to_point", "inside", 2, table)])
    devices = {
        name: replace(device, count=2 * device.count, node=Node(2, ratio))
        for name, device in problem.cluster.devices.items()
    }
    cluster = replace(problem.cluster, devices=devices, network=network)
    return replace(problem, cluster=cluster, coding=replace(problem.coding, codecs=LEVELS))


def every(problem: Problem) -> list[Evaluation]:
    choices = {
        (name, op): formats
        for name in problem.open
        for op, formats in problem.classes[name].choices.items()
    }
    evaluator, evaluations = PlanEvaluator(problem, problem.uniform()), []
    for picked in itertools.product(*choices.values()):
        plans: dict[str, dict[str, str]] = {name: {} for name in problem.open}
        for (name, operator), fmt in zip(choices, picked, strict=True):
            plans[name][operator] = fmt
        assert problem.coding is not None
        for codecs in itertools.product(problem.coding.codecs, repeat=len(evaluator.buckets)):
            evaluations.append(evaluator.set_plans(plans, codecs))
    return evaluations


@pytest.mark.parametrize("classes", ["one", "kept", "nodes"])
@settings(
    max_examples=chosen([3], [8], [25])[0],
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 10**6),
    tight=st.floats(0.0, 0.6),
    least=st.sampled_from(["variance", "seconds"]),
)
def test_formats_and_codecs_equal_brute_force(
    classes: str, seed: int, tight: float, least: str
) -> None:
    problem = drawn(seed, "one" if classes == "nodes" else classes)
    if classes == "nodes":
        problem = in_nodes(problem, seed)
    evaluations = every(problem)
    assert 2 <= len(evaluations[0].codecs) <= 5
    if least == "variance":
        values = sorted(evaluation.seconds for evaluation in evaluations)
        problem = replace(problem, seconds=values[int(tight * (len(values) - 1))])
    else:
        values = sorted(evaluation.variance for evaluation in evaluations)
        problem = replace(problem, least="seconds", variance=values[int(tight * (len(values) - 1))])
    best = min(
        evaluation.value(problem) for evaluation in evaluations if not evaluation.exceeds(problem)
    )
    answer = MilpAllocator().allocate(problem)
    assert answer.fits
    assert (
        answer.evaluation
        == PlanEvaluator(problem, answer.plans, answer.evaluation.codecs).evaluate()
    )
    assert answer.value == pytest.approx(best, rel=1.1e-4, abs=1e-12)
    assert answer.bound is not None
    assert answer.bound <= best * (1 + 1e-6) + 1e-12


def test_device_classes_share_the_codecs() -> None:
    for seed in range(20):
        problem = drawn(seed, "two")
        evaluator = PlanEvaluator(problem, problem.uniform())
        coded, plain = (
            evaluator.set_plans(problem.uniform("bf16"), (codec,) * len(evaluator.buckets)).seconds
            for codec in ("qsgd8", "fp32")
        )
        if coded < 0.8 * plain:
            break
    answer = MilpAllocator().allocate(replace(problem, seconds=coded * 1.05))
    assert answer.fits
    assert set(answer.evaluation.codecs) & {"qsgd8", "qsgd2"}
    assert answer.gap is not None
    assert answer.gap <= 1.1e-4


def test_times_that_depend_on_neighbours_keep_the_bound() -> None:
    for seed in range(chosen([2], [6], [12])[0]):
        problem = drawn(seed, "one", DrawnTimes)
        evaluations = every(problem)
        values = sorted(evaluation.seconds for evaluation in evaluations)
        problem = replace(problem, seconds=values[len(values) // 5])
        best = min(
            evaluation.variance for evaluation in evaluations if not evaluation.exceeds(problem)
        )
        answer = MilpAllocator().allocate(problem)
        assert answer.fits
        assert answer.bound is None or answer.bound <= best * (1 + 1e-6)


def test_codecs_are_chosen_for_slow_links_only() -> None:
    problem = drawn(1, "one")
    network = problem.cluster.network
    assert network is not None and network.bandwidth is not None
    codecs = {}
    for factor in (1e-3, 1e6):
        linked = replace(
            problem.cluster,
            network=replace(network, bandwidth=network.bandwidth * factor, latency=0.0),
        )
        changed = replace(problem, cluster=linked)
        limit = 1.5 * PlanEvaluator(changed, changed.uniform()).variance + 1.0
        codecs[factor] = (
            MilpAllocator()
            .allocate(replace(changed, least="seconds", variance=limit))
            .evaluation.codecs
        )
    assert set(codecs[1e6]) == {"fp32"}
    assert set(codecs[1e-3]) != {"fp32"}


def test_infeasible_limit_is_reported() -> None:
    problem = replace(drawn(2, "kept"), seconds=1e-9)
    with pytest.raises(PlanError, match=r"a step takes .* at least"):
        MilpAllocator().allocate(problem)
