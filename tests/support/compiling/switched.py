"""Plans, a check of warnings, and a counter of compilations for the tests of
`qsync_fx.switch_plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch._dynamo.utils import counters

from qsync_fx import Plan

INT8, BF16, FP32 = Plan.uniform("int8"), Plan.uniform("bf16"), Plan.uniform("fp32")
NOT_FOLLOWED = pytest.mark.filterwarnings("error:this is version")
"""Fails a test on the warning that a plan is not applied."""


def compilations(run: Callable[[], Any]) -> int:
    before = counters["stats"]["unique_graphs"]
    run()
    return counters["stats"]["unique_graphs"] - before
