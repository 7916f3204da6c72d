"""Fleets of QSync with catalog devices: 16 V100 in FP32 and 16 T4, and 2,048 of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsync_fx.allocator import PlanResult, Problem, evaluate_plan
from qsync_fx.allocator.baselines import DynamicBatches, Uniform
from qsync_fx.allocator.evaluator import resized
from qsync_fx.allocator.milp.milp_allocator import MilpAllocator
from qsync_fx.allocator.recovery import PrecisionRecovery
from tests.support import tiers
from tests.support.planning.catalog_fleets import of_catalog, symbolic


def of_paper(name: str, count: int, room: float | None = None) -> Problem:
    """Return the problem of a fleet. `room` is the T4 memory limit, as a share of the range between
    the INT8 and FP32 peaks.
    """
    problem = of_catalog(name, batch=128, count=count)
    if room is not None:
        low, high = (
            evaluate_plan(problem, problem.uniform(fmt)).classes["t4"].peak_bytes or 0
            for fmt in ("int8", "fp32")
        )
        t4 = replace(problem.classes["t4"], memory=low + room * (high - low))
        problem = replace(problem, classes={**problem.classes, "t4": t4})
    return replace(problem, seconds=Uniform("int8").allocate(problem).evaluation.seconds)


def all_of(problem: Problem, name: str) -> dict[str, PlanResult]:
    batches = DynamicBatches(
        lambda device, batch: resized(problem.classes[device], symbolic(name, device), batch)
    )
    allocators = (MilpAllocator(), PrecisionRecovery(), Uniform("int8"), batches, Uniform("fp32"))
    return {allocator.name: allocator.allocate(problem) for allocator in allocators}


@pytest.mark.parametrize("count", [16, 2048])
@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("perceptron", None),
        *(
            pytest.param(name, room, marks=tiers.ALL)
            for name in ("bert", "resnet")
            for room in (None, 0.5)
        ),
    ],
)
def test_throughput_order_equals_the_paper(name: str, room: float | None, count: int) -> None:
    answers = all_of(of_paper(name, count, room), name)
    seconds = {allocator: answer.evaluation.seconds for allocator, answer in answers.items()}
    for ours in ("milp", "paper"):
        assert answers[ours].fits
        assert seconds[ours] <= seconds["uniform-int8"] * (1 + 1e-9)
        assert answers[ours].evaluation.variance < answers["uniform-int8"].evaluation.variance
    assert seconds["dynamic-batches"] < seconds["uniform-fp32"]
    # If T4 in low precision are as fast as V100 in FP32, smaller batches do not help (QSync,
    # Tables IV and V).
    if answers["milp"].evaluation.classes["v100"].waiting < 0.01 * seconds["milp"]:
        assert seconds["milp"] < seconds["dynamic-batches"]


def test_a_plan_is_of_classes_and_not_of_their_counts() -> None:
    few, many = (of_paper("perceptron", count) for count in (16, 2048))
    unlimited = [replace(problem, seconds=1.0) for problem in (few, many)]
    plans = [PrecisionRecovery().allocate(problem).plans for problem in unlimited]
    assert plans[0] == plans[1]
    assert evaluate_plan(many, few.uniform()).variance == pytest.approx(
        evaluate_plan(few, few.uniform()).variance * 16 / 2048
    )
