"""Model, patterns and training step for the tests of `@qsync_fx.rewrite`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qsync_fx
from tests.support.models.small_models import build, gradients


class Net(nn.Module):
    """Norm, linear, GELU, linear, GELU, dropout: `[..., 8]` to `[..., 8]`."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(F.gelu(self.second(F.gelu(self.first(self.norm(x))))))


def explained(
    *passes: object, model: Any = None, args: tuple[Any, ...] = (), **options: object
) -> Any:
    model = build(Net) if model is None else model
    return qsync_fx.explain(
        model,
        *(args or (torch.randn(4, 8),)),
        options={"precision": "fp32", **options, "passes": list(passes)},
    )


def places(explanation: Any) -> dict[str, int]:
    return {name: done.count for name, done in explanation.rewritten.items()}


def step(
    run: Callable[..., Tensor], model: nn.Module, *args: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    output = run(*args)
    output.square().mean().backward()
    return output.detach(), gradients(model)


def rewriting(find: Callable[..., Any], put: Callable[..., Any], **options: Any) -> Any:
    return qsync_fx.rewrite(**options)(find).replacement(put)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias))


def addmm_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.addmm(bias, x, weight.t()))


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)
