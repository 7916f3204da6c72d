"""Depths of operators, and the indicator of QSync."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.indicators import omega
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.indicator import formulas
from qsync_fx.predictor.indicator.formulas import depths
from qsync_fx.predictor.indicator.rounding_variance import noise


def test_a_depth_is_the_longest_path() -> None:
    """A breadth-first search would reach this block's addition by its short branch."""
    inputs = {"x": [], "a": ["x"], "b": ["a"], "add": ["x", "b"], "c": ["add"]}
    assert depths(inputs, "abc") == {"x": 0, "a": 1, "b": 2, "add": 2, "c": 3}


def test_omega_is_caused_and_the_papers_indicator_is_received_variance() -> None:
    first, last = omega(0.5, 1, 4, 10.0, 2.0, 3.0), omega(0.5, 4, 4, 10.0, 2.0, 3.0)
    assert (first, last) == (0.25 * 4 * 10 + 2, 0.25 * 10 + 2 + 3 * 3)
    assert formulas.indicator(0.5, 1, 4, 10.0, 2.0) == 0.25 * 10 + 3 * 2.0
    assert formulas.indicator(0.5, 4, 4, 10.0, 2.0) == 0.25 * 4 * 10


def test_common_exponent_overestimates_the_noise() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    fp16 = FORMATS["fp16"]
    assert formulas.moments(x, fp16).spread / 6 > 20 * float(noise(x, fp16).sum())
    assert formulas.moments(x, fp16).spread == pytest.approx(
        x.numel() * 2.0 ** (2 * (2 - 9))
    )  # k = 9; the largest element is above 4
    assert formulas.moments(torch.zeros(3), fp16).spread == 3 * 2.0 ** (2 * (-14 - 9))
    assert formulas.moments(torch.empty(0), fp16).square == 0


def test_gradients_of_fixed_point_are_floats() -> None:
    assert formulas.gradient_format(FORMATS["int8"]) is FORMATS["bf16"]
    assert formulas.gradient_format(FORMATS["fp16"]) is FORMATS["fp16"]
