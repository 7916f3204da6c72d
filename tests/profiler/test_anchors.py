"""Measured peaks of a profile, which correct predictions of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qsync_fx import Plan
from qsync_fx.predictor.cost_mapper import states
from qsync_fx.predictor.memory import anchored_bytes
from qsync_fx.profiler.measurement import measure
from qsync_fx.profiler.profile import anchors


def test_measured_plan_has_its_measured_peak() -> None:
    torch.manual_seed(0)

    def step(model: Any, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    # All of its kernels are library calls, so that no C++ is compiled.
    profile = measure(
        nn.Linear(16, 8, bias=False),
        step,
        [torch.ones(4, 16)],
        ["fp32"],
        repeats=2,
        progress=False,
        sensitivity=None,
    )
    (anchor,) = anchors(profile)
    (run,) = profile.runs
    assert anchor.states.names == states(profile.graph, Plan("fp32")).names
    assert anchored_bytes(states(profile.graph, Plan("fp32")), [anchor]) == run.peak_bytes
