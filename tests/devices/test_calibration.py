"""Calibration of device constants: a fit recovers known constants from computed times, and predicts
times of other shapes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.published.calibration import Point, Problem, fit

RANDOM = np.random.default_rng(0)


def products(count: int) -> list[Point]:
    sides = 2 ** RANDOM.integers(4, 13, (count, 3))
    return [
        Point(
            "t4",
            "fp16",
            "gemm",
            (int(m), int(n), int(k)),
            str(RANDOM.choice(["nn", "tn", "nt"])),
            1.0,
        )
        for m, n, k in sides
    ]


def convolutions(count: int) -> list[Point]:
    return [
        Point(
            str(RANDOM.choice(["t4", "v100"])),
            "fp16",
            "output",
            (
                *(int(2**power) for power in RANDOM.integers((0, 3), (6, 10))),
                28,
                28,
                int(2 ** RANDOM.integers(3, 10)),
                *(3, 3, 1, 1, 1, 1),
            ),
            "",
            1.0,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    "points", [products(60), convolutions(60)], ids=["products", "convolutions"]
)
def test_fit_recovers_constants(points: list[Point]) -> None:
    problem = Problem(points, tuple(sorted({point.device for point in points})))
    away = RANDOM.normal(0, 0.7, (len(problem.devices), len(problem.usual())))
    away[:] = away[0]
    seconds = np.exp(problem.reckon(away, problem.parts(points)))
    measured = [
        replace(point, seconds=float(value)) for point, value in zip(points, seconds, strict=True)
    ]
    fitted = fit(measured[:45])
    assert np.abs(fitted.seconds(measured[:45]) / seconds[:45] - 1).mean() < 0.02
    assert np.abs(fitted.seconds(measured[45:]) / seconds[45:] - 1).mean() < 0.06
    before = problem.reckon(np.zeros_like(away), problem.parts(measured))
    assert np.abs(np.exp(before) / seconds - 1).mean() > 0.1


def test_fitted_constants_are_in_their_ranges() -> None:
    fitted = fit(
        [replace(point, seconds=1e-4 + 1e-6 * index) for index, point in enumerate(products(12))],
        steps=5,
    )
    written = fitted.of("t4")
    assert written["alignment"] == 8 and set(written["layouts"]) == {"tn", "nt"}
    assert (
        0 < written["efficiency"] <= 1.05
        and 0 < written["alone"] <= 1
        and written["smallest"] in (32, 64, 128)
    )
