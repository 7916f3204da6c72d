"""What the tests of DUO write its algorithm with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gradients(parameters: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def steps(optimizer: torch.optim.Optimizer, parameters: Any, values: list[Tensor | None], rate: float) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.grad = value
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def same(ones: Any, others: Any) -> bool:
    return all(torch.equal(p, q) for p, q in zip(ones, others, strict=True))
