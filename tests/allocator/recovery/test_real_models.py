"""Precision recovery on real models and catalog devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsync_fx.allocator import PlanEvaluator, Problem, evaluate_plan
from qsync_fx.allocator.problem import uniforms
from qsync_fx.allocator.recovery import PrecisionRecovery, initial, units
from tests.support import tiers
from tests.support.planning.catalog_fleets import MODELS, of_catalog

pytestmark = tiers.ALL
COMPRESSIBLE = [name for name in MODELS if name != "perceptron"]
"""Excludes the perceptron: its step waits for gradients, and the copies of its weights in one byte
per value need more memory than its activations save.
"""


def hybrid(problem: Problem, room: float | None) -> Problem:
    """Return the problem of QSync: the time limit is the narrowest uniform plan's, and the memory
    limit is a share of the range between the narrowest and widest plans.
    """
    plans = uniforms(problem)
    narrow, wide = evaluate_plan(problem, plans["int8"]), evaluate_plan(problem, plans["fp32"])
    low, high = (evaluation.classes["t4"].peak_bytes or 0 for evaluation in (narrow, wide))
    memory = None if room is None else low + room * (high - low)
    t4 = replace(problem.classes["t4"], memory=memory)
    return replace(problem, seconds=narrow.seconds, classes={**problem.classes, "t4": t4})


@pytest.mark.parametrize("name", COMPRESSIBLE)
@pytest.mark.parametrize("room", [None, 0.0, 0.3, 0.7])
def test_recovered_plan_is_fast_and_has_less_variance_than_uniform_plans(
    name: str, room: float | None
) -> None:
    problem = hybrid(of_catalog(name), room)
    answer = PrecisionRecovery().allocate(problem)
    assert answer.evaluation == evaluate_plan(problem, answer.plans)
    assert answer.fits
    assert answer.plans["v100"] == problem.classes["v100"].uniform("fp32")
    evaluations = [evaluate_plan(problem, plans) for plans in uniforms(problem).values()]
    fit = [evaluation.variance for evaluation in evaluations if not evaluation.exceeds(problem)]
    assert fit
    assert answer.value <= min(fit)
    if room != 0.0:
        assert answer.value < min(fit), (
            "T4 ranks in narrow formats wait for V100 ranks, so operators can be restored"
        )
    assert answer.plans == PrecisionRecovery().allocate(problem).plans


@pytest.mark.parametrize("name", COMPRESSIBLE)
def test_memory_is_shared_out_by_how_far_parts_can_be_compressed(name: str) -> None:
    for room in (0.0, 0.3, 0.8):
        problem = hybrid(of_catalog(name), room)
        part = problem.classes["t4"]
        assert part.memory is not None
        start = initial(part, units(part), PlanEvaluator(problem, problem.uniform()), "t4")
        metrics = evaluate_plan(problem, {**problem.uniform(), "t4": start}).classes["t4"]
        assert (metrics.peak_bytes or 0) <= part.memory
        assert (
            metrics.computing <= evaluate_plan(problem, problem.uniform()).classes["t4"].computing
        )
