"""Computing time of a step: from the call of the compiled model to the last gradient, plus the
optimizer's step.

The tests advance a simulated clock, so that each part of a step has a known duration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qsync_fx.distributed.drift import Pace

FORWARD, BACKWARD, LOSS, STEP, OUTSIDE = 3.0, 5.0, 0.5, 2.0, 100.0
OPTIONS = {"precision": "bf16", "inner_backend": "aot_eager"}


class Model(nn.Module):
    """Model with a compiled layer that advances the clock in its forward and backward pass."""

    def __init__(self, ticks: Callable[[float], None], saves: bool, inside: bool) -> None:
        super().__init__()
        self.layer, self.ticks, self.saves = nn.Linear(4, 4), ticks, saves
        if inside:
            self.layer.compile(backend="qsync", options=OPTIONS)
        else:
            self.layer = torch.compile(nn.Sequential(self.layer), backend="qsync", options=OPTIONS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, x, use_reentrant=False) if self.saves else self.layer(x)
        self.ticks(FORWARD)
        if y.requires_grad:
            y.register_hook(lambda _: self.ticks(BACKWARD))
        return y


@pytest.mark.parametrize(("saves", "inside"), [(False, False), (False, True), (True, False)])
def test_step_time_includes_passes_and_optimizer(saves: bool, inside: bool) -> None:
    now = [0.0]

    def ticks(seconds: float) -> None:
        now[0] += seconds

    model = Model(ticks, saves, inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def a_pass() -> None:
        loss = model(torch.randn(2, 4)).square().mean()
        ticks(LOSS)
        loss.backward()
        ticks(OUTSIDE)  # DistributedDataParallel waits here, after the last gradient

    def a_step(passes: int) -> Any:
        ticks(OUTSIDE)
        for _ in range(passes):
            a_pass()
        with torch.no_grad():
            model(torch.randn(2, 4))
        pace.begin()
        optimizer.step()
        ticks(STEP)
        duration = pace.end()
        optimizer.zero_grad()
        return duration

    pass_seconds = FORWARD + LOSS + BACKWARD
    with Pace(model, lambda: now[0]) as pace:
        assert a_step(1) == pass_seconds + STEP
        assert a_step(3) == pass_seconds + STEP, "the step time has the mean over passes"
        model.train(False)
        assert a_step(1) is None, "a pass in eval mode is not timed"
        model.train()
        assert a_step(1) == pass_seconds + STEP
    assert a_step(1) is None, "the hooks are removed"
