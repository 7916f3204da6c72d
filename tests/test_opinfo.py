"""A sample of PyTorch's operator database through the backend; `tests/opinfo.py --all` runs all of it."""

from __future__ import annotations

import os
from collections import Counter

import opinfo
import pytest
import torch

# Another sample every day of the year would find more, but a test should fail for what was changed.
SEED = int(os.environ.get("OPINFO_SEED", "0"))


@pytest.mark.parametrize(("precision", "operators"), [("fp32", 30), ("bf16", 20)])
def test_a_sample_of_operators(precision: str, operators: int) -> None:
    found = list(opinfo.survey(opinfo.chosen_entries(operators, SEED), samples=1, precision=precision))
    failures = [f"{o.operator} ({o.form}): {o.result}: {o.detail}" for o in found if o.result in opinfo.FAILURES]
    assert not failures
    counts = Counter(outcome.result for outcome in found)
    compared = counts["equal"] + counts["eager equal"] + counts["close"]
    assert compared >= 0.8 * len(found), counts


def test_a_difference_is_found() -> None:
    """The comparison itself: a last bit, a sign of zero is none, NaN equals NaN, a missing gradient is a difference."""
    one = torch.tensor([1.0, float("nan"), 0.0])
    near = torch.tensor([1.0 + 2**-23, float("nan"), 0.0])
    assert opinfo._difference([one, None], [one.clone(), None]) is None
    assert opinfo._difference([one], [near]) is not None
    assert opinfo._difference([one], [one.neg().neg()]) is None
    assert opinfo._difference([one], [None]) is not None
    assert opinfo._difference([one], [one.double()]) is not None
    assert opinfo._near([one], [near], 1e-6)[0] == "close"
    assert opinfo._near([one * 2], [one], 0.4)[0] == "far"
