"""Normalization of interleaved runs, which removes slowdowns by other processes."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings, strategies as st

from qsync_fx.profiler.run_statistics import (
    MeasuredOperator,
    MeasuredRun,
    faster_half,
    levelled,
)


def run(label: str, seconds: float, longer: list[float]) -> MeasuredRun:
    """Return a run of steps slowed by the factors `longer`.

    Its operator has two thirds of the duration of the median step.
    """
    steps = [
        (0.25 * seconds * factor, 0.75 * seconds * factor, 0.1 * seconds * factor)
        for factor in longer
    ]
    typical = statistics.median(longer) * seconds
    return MeasuredRun(
        label, steps, 0, [MeasuredOperator("fc/linear", "fp32", "fp32", typical / 6, typical / 2)]
    )


def test_noisier_plan_is_normalized() -> None:
    quiet = [1.0, 1.0, 1.01, 1.0, 1.02, 1.01, 1.0, 1.01]
    disturbed = [1.0, 1.3, 1.5, 1.0, 1.2, 1.4, 1.0, 1.3]
    before = [run("a", 1.0, quiet), run("b", 2.0, disturbed), run("c", 3.0, quiet)]
    assert before[1].passes / before[0].passes > 2.4
    now = levelled(before)
    assert now[1].passes / now[0].passes < 2.15
    assert now[2].passes / now[0].passes == pytest.approx(3.0, rel=0.01)
    # Runs on a mostly idle machine determine the typical duration.
    assert now[0].passes == pytest.approx(before[0].passes, rel=1e-9)
    # The share of operators in the passes is unchanged.
    (operator,) = now[1].operators
    assert operator.forward + operator.backward == pytest.approx(now[1].passes * 2 / 3)


def test_normalization_reduces_noise() -> None:
    chance, by_median, by_level = random.Random(7), [], []
    for _ in range(200):
        runs = [
            run(
                str(index),
                1.0,
                [1 + chance.expovariate(4.0) * (chance.random() < 0.6) for _ in range(15)],
            )
            for index in range(6)
        ]
        for group, errors in ((runs, by_median), (levelled(runs), by_level)):
            passes = [item.passes for item in group]
            errors += [abs(item / statistics.mean(passes) - 1) for item in passes]
    assert statistics.mean(by_level) < 0.5 * statistics.mean(by_median)


@settings(max_examples=50, deadline=None)
@given(
    seconds=st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=6),
    longer=st.lists(st.floats(1.0, 4.0), min_size=1, max_size=9),
)
def test_equally_noisy_plans_are_unchanged(seconds: list[float], longer: list[float]) -> None:
    runs = [run(str(index), each, longer) for index, each in enumerate(seconds)]
    for before, now in zip(runs, levelled(runs), strict=True):
        assert now.passes == pytest.approx(before.passes, rel=1e-9)
        assert faster_half([a + b for a, b, _ in now.steps]) <= now.passes * (1 + 1e-9)
