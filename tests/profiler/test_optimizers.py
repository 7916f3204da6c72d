"""Predicted state and workspace of optimizers for parameters of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from qsync_fx.errors import ProfileError
from qsync_fx.profiler.timing.measured_memory import measured_peak, optimizer_memory

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: SGD(p, lr=0.1),
        lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        Adam,
        lambda p: AdamW(p, fused=True),
        lambda p: AdamW(p, foreach=True),
        RMSprop,
    ],
    ids=["sgd", "nesterov", "adam", "fused", "together", "rmsprop"],
)
def test_optimizer_memory_equals_the_optimizer(make: Make) -> None:
    numels = [3000, 50_000, 20_000]
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in numels]
    optimizer = make(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state_bytes = sum(
        v.nbytes for state in optimizer.state.values() for v in state.values() if v.numel() > 1
    )
    memory = optimizer_memory(optimizer)
    assert memory.state_bytes(numels) == state_bytes
    assert memory.step_bytes(numels) == pytest.approx(measured_peak(optimizer.step), abs=1024)


class Needs(Optimizer):
    """An optimizer that cannot be constructed for other parameters."""

    def __init__(self, parameters: Any, names: list[str]) -> None:
        super().__init__(parameters, {})
        self.names = names

    def step(self, closure: Any = None) -> None:
        pass


def test_unsupported_optimizer_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ProfileError, match=r"(?s)Needs.*OptimizerMemory"):
        optimizer_memory(Needs([nn.Parameter(torch.zeros(2))], ["weight"]))
