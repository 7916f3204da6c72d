"""Reference steps of DUO's algorithm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gradients(parameters: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def both(
    ours: Any, exact: Any, x: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None], float]:
    """Train one step of `ours`, and compute the gradients of `exact` at the same parameters.

    Return both lists of gradients and the learning rate of the step.
    """
    rate = ours.optimizer.param_groups[0]["lr"]
    ours.optimizer.zero_grad()
    ours.loss(x).backward()
    fast = gradients(ours.model.parameters())
    with torch.no_grad():
        for p, q in zip(exact.model.parameters(), ours.model.parameters(), strict=True):
            p.copy_(q)
    exact.optimizer.zero_grad()
    exact.loss(x).backward()
    ours.optimizer.step()
    ours.schedule.step()
    return fast, gradients(exact.model.parameters()), rate


def steps(
    optimizer: torch.optim.Optimizer, parameters: Any, values: list[Tensor | None], rate: float
) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.grad = value
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


def same(ones: Any, others: Any) -> bool:
    return all(torch.equal(p, q) for p, q in zip(ones, others, strict=True))
