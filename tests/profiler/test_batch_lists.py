"""Rejection of a single batch instead of a list of batches.

All functions that run steps reject it before the first step.
"""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import qsync_fx
from qsync_fx import OptionError
from qsync_fx.profiler.timing.step_timers import first_batch
from tests.support.planning.measured_layer import BATCH, Counted, layer, quick

Pair = namedtuple("Pair", ["x", "y"])
SINGLE = [
    torch.zeros(4, 16),
    torch.zeros(()),
    np.zeros((4, 16)),
    {"x": torch.zeros(4, 16)},
    UserDict(x=torch.zeros(4, 16)),
    Pair(torch.zeros(4, 16), torch.zeros(4)),
    "batches",
    None,
    3,
]


def measured(step: Counted, batches: Any) -> None:
    qsync_fx.measure(layer(), step, batches, ["fp32"], repeats=1, progress=False)


def sensitivity(step: Counted, batches: Any) -> None:
    qsync_fx.sensitivity(layer(), step, batches, precisions=["bf16"], steps=1)


def planned(step: Counted, batches: Any) -> None:
    profile = qsync_fx.catalog_profile("t4", layer(), Counted(), BATCH, ["fp32"])
    qsync_fx.find_plan(profile, model=layer(), step=step, batches=batches, progress=False)


def planned_by_ranks(step: Counted, batches: Any) -> None:
    qsync_fx.distributed.measure_and_plan(layer(), step, batches, progress=False)


@pytest.mark.parametrize("batches", SINGLE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("function", [measured, sensitivity, planned, planned_by_ranks])
def test_a_single_batch_is_refused(function: Callable[[Counted, Any], None], batches: Any) -> None:
    step = Counted()
    with pytest.raises(
        OptionError, match=r"batches is of type .*, which is one batch or none"
    ) as caught:
        function(step, batches)
    assert caught.value.where == "batches" and "[batch]" in (caught.value.do or "")
    assert not step.calls


def test_lists_and_loaders_of_batches() -> None:
    x = torch.arange(6.0).view(3, 2)
    for batches in ([x], (x,), iter([x]), DataLoader(TensorDataset(x), batch_size=3)):
        first, every = first_batch(batches)
        assert torch.equal(first[0] if isinstance(first, list) else first, x)
        assert len(list(every)) == 1
    with pytest.raises(OptionError, match="there is no batch"):
        first_batch([])


def test_single_batch_list_is_measured() -> None:
    step = Counted()
    assert quick(layer(), step, repeats=1).runs and step.calls
