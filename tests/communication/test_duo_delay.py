"""DUO without immediate gradients delays gradients by one step. Its largest stable learning rates
and the oscillation beyond them follow the recurrence in docs/duo.md.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from tests.support import tiers
from tests.support.processes import ranks

run = functools.partial(ranks.results, script="duo_delay_rank.py")


def limits(momentum: float) -> dict[str, float]:
    """Return the least product of learning rate and curvature that does not converge."""
    square = 1 - momentum**2
    root = math.sqrt(square**2 + 4 * momentum**2 * (1 - momentum))
    return {
        "fp32": 2 * (1 + momentum),
        "duo0": (root - square) / (2 * momentum**2),
        "stays": 1 - momentum,
    }


def periods(momentum: float) -> dict[str, float]:
    """Return the period of the oscillation at the limit, in steps, by the characteristic roots."""
    limit = limits(momentum)
    cosines = {
        "fp32": -1.0,
        # The third root is the product of the limit and the momentum.
        "duo0": (1 + momentum - momentum * limit["duo0"]) / 2,
        "stays": (1 + momentum) / 2,
    }
    return {codec: 2 * math.pi / math.acos(cosine) for codec, cosine in cosines.items()}


@pytest.mark.parametrize("momentum", [0.5, pytest.param(0.9, marks=tiers.ALL)])
def test_stable_learning_rate_is_that_of_the_recurrence(momentum: float, tmp_path: Path) -> None:
    limit = limits(momentum)
    assert limit["stays"] < limit["duo0"] < limit["fp32"]
    cases = [(codec, factor * rate) for codec, rate in limit.items() for factor in (0.97, 1.03)]
    cases.append(("duo4", limit["fp32"] / 2))
    for converged in run("stability", 2, tmp_path, ways=cases, momentum=momentum, steps=300):
        assert converged == [True, False] * 3 + [True]


@tiers.ALL
def test_gradients_of_a_gpt_oscillate_with_the_period_of_the_limit(tmp_path: Path) -> None:
    expected = periods(0.9)
    assert [round(period, 1) for period in expected.values()] == [2.0, 10.8, 19.8]
    for result in run("oscillation", 2, tmp_path):
        assert result["fp32"]["loss"] < result["duo0"]["loss"] < result["stays"]["loss"]
        assert result["fp32"]["cosines"][1] < -0.5
        for codec in ("duo0", "stays"):
            cosines, period = result[codec]["cosines"], expected[codec]
            half = min(range(len(cosines)), key=cosines.__getitem__)
            peak = max(range(half, len(cosines)), key=cosines.__getitem__)
            assert half == pytest.approx(period / 2, rel=0.15), codec
            assert peak == pytest.approx(period, rel=0.15), codec
            assert cosines[half] < -0.5 and cosines[peak] > 0.3, codec
