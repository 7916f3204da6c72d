"""What tests of `qsync_fx.switch_plan` share: plans, how it is told that one will not be followed,
and what counts compilations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch._dynamo.utils import counters

from qsync_fx import Plan

INT8, BF16, FP32 = Plan.uniform("int8"), Plan.uniform("bf16"), Plan.uniform("fp32")
NOT_FOLLOWED = pytest.mark.filterwarnings("error:this is version")
"""Has a test fail where a plan will not be followed, which is told in a warning."""


def compilations(run: Callable[[], Any]) -> int:
    before = counters["stats"]["unique_graphs"]
    run()
    return counters["stats"]["unique_graphs"] - before
