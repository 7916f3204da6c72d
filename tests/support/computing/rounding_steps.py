"""Training steps whose gradients depend on the random numbers of their roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models.small_models import Perceptron, build, compiled, gradients


def step(fast: Any, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, 16 * 16).reshape(16, 16)
    fast(x).square().mean().backward()
    return gradients(model)


def started(precision: str = "int8", **options: Any) -> Callable[[], dict[str, Tensor]]:
    """Return a compiled training step that draws no random numbers from torch."""
    model = build(Perceptron)
    fast = compiled(model, precision=precision, **options)
    step(fast, model)
    return lambda: step(fast, model)


def differ(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return any(not torch.equal(first[name], second[name]) for name in first)
