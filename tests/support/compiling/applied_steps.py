"""Models and a training step for the tests of `qsync_fx.plan_coverage`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qsync_fx
from qsync_fx import PlanWarning


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="qsync", options={"inner_backend": "eager", **options})


def step(model: nn.Module, call: Callable[[], Tensor]) -> list[str]:
    """Train one step and return its warnings."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call().square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught if issubclass(warning.category, PlanWarning)]


def uncovered(model: nn.Module) -> dict[str, str]:
    return {
        module.path: str(module.cause.why) for module in qsync_fx.plan_coverage(model).uncovered
    }


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Outer(nn.Module):
    """Module that calls `inner` between two layers, on its input and output."""

    def __init__(self, inner: nn.Module, out: int = 4) -> None:
        super().__init__()
        self.start, self.inner, self.end = nn.Linear(16, 16), inner, nn.Linear(out, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.start(x))
        return self.end(x if isinstance(x, Tensor) else x[0])


# Modules outside of graphs, by reason.


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 4), 1

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


# The check of a plan.


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)
