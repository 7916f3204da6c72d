"""Agreement of two sensitivity maps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from scipy.stats import spearmanr

from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity, agreement, spearman


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_spearman_is_scipys(pairs: list[tuple[int, int]]) -> None:
    first, second = zip(*pairs, strict=True)
    result = spearman(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert math.isnan(result)
    else:
        assert result == pytest.approx(spearmanr(first, second)[0])


def test_agreement() -> None:
    truth = Sensitivity(
        "monte_carlo", "Net", {"a/x": {"int8": 1.0}, "b/x": {"int8": 4.0}, "c/x": {"int8": 0.0}}
    )
    estimate = Sensitivity(
        "second_order",
        "Net",
        {"a/x": {"int8": 2.0}, "b/x": {"int8": 8.0}, "c/x": {"int8": 0.0}, "d/x": {}},
    )
    result = agreement(estimate, truth, "int8")
    assert (result.operators, result.ratio, result.spread) == (2, pytest.approx(2), 4)
    assert result.spearman == pytest.approx(1)
    nothing = agreement(estimate, truth, "bf16")
    assert nothing.operators == 0 and math.isnan(nothing.spearman) and math.isnan(nothing.ratio)
