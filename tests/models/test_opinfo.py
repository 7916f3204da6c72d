"""Sample of PyTorch's operator database through the backend; `tests/support/models/opinfo.py --all`
runs all of it.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.support import tiers
from tests.support.models import opinfo

# A new sample each day would find more, but a test should fail only for a change of the code.
SEED = int(os.environ.get("OPINFO_SEED", "0"))


@pytest.mark.parametrize(
    ("precision", "operators"),
    tiers.chosen([("fp32", 5)], [("fp32", 30), ("bf16", 20)]),
)
def test_a_sample_of_operators(precision: str, operators: int) -> None:
    outcomes = list(
        opinfo.survey(opinfo.chosen_entries(operators, SEED), samples=1, precision=precision)
    )
    failures = [
        f"{o.operator} ({o.form}): {o.result}: {o.detail}"
        for o in outcomes
        if o.result in opinfo.FAILURES
    ]
    assert not failures
    counts = Counter(outcome.result for outcome in outcomes)
    compared = counts["equal"] + counts["eager equal"] + counts["close"]
    assert compared >= 0.8 * len(outcomes), counts
