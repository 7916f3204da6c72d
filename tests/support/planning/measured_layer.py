"""Layer that is profiled within a second, and a step that counts its calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qsync_fx.profiler.measurement import measure
from qsync_fx.profiler.profile import Profile

BATCH = torch.ones(4, 16), torch.ones(4, 8)


class Counted:
    """Step that counts its calls, and raises KeyboardInterrupt at one of them."""

    def __init__(self, interrupted_at: int = -1) -> None:
        self.calls, self.interrupted_at = 0, interrupted_at

    def __call__(self, model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def layer(inputs: int = 16) -> nn.Module:
    """Return a model that uses only library kernels, so that no C++ is compiled."""
    torch.manual_seed(0)
    return nn.Linear(inputs, 8, bias=False)


def quick(model: nn.Module, step: Any, **more: Any) -> Profile:
    return measure(
        model,
        step,
        [BATCH],
        ["fp32"],
        **{"repeats": 2, "progress": False, "sensitivity": None, **more},
    )
