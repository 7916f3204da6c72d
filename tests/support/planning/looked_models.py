"""Models, batches and a step for the tests of tensor statistics."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


def step(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches(width: tuple[int, ...] = (16,), count: int = 4, size: int = 32) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, *width, generator=generator),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def wide(activation: Callable[[], nn.Module]) -> nn.Module:
    widths = (16, 64, 24, 96, 32, 10)
    layers = [
        part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), activation())
    ][:-1]
    model = nn.Sequential(*layers)
    for index, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=(0.5 + index % 3) * layer.in_features**-0.5)
    return model
