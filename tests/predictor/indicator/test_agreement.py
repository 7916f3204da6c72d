"""How well one sensitivity tells another."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st
from scipy.stats import spearmanr

from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity, agreement, spearman


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_spearman_is_scipys(pairs: list[tuple[int, int]]) -> None:
    first, second = zip(*pairs, strict=True)
    found = spearman(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(first, second)[0])


def test_agreement() -> None:
    truth = Sensitivity(
        "monte_carlo", "Net", {"a/x": {"int8": 1.0}, "b/x": {"int8": 4.0}, "c/x": {"int8": 0.0}}
    )
    found = Sensitivity(
        "second_order",
        "Net",
        {"a/x": {"int8": 2.0}, "b/x": {"int8": 8.0}, "c/x": {"int8": 0.0}, "d/x": {}},
    )
    held = agreement(found, truth, "int8")
    assert (held.operators, held.ratio, held.spread) == (2, pytest.approx(2), 4)
    assert held.spearman == pytest.approx(1)
    nothing = agreement(found, truth, "bf16")
    assert nothing.operators == 0 and math.isnan(nothing.spearman) and math.isnan(nothing.ratio)
