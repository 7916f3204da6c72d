"""Handwritten digits, which scikit-learn ships, and what the examples say when they are done."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qsync_fx

CLASSES = ("training", "inference")
FORMATS = {"training": ["fp32"], "inference": ["fp32", "bf16"]}
"""Both ranks run on one processor here: the first one stands for a device that trains in FP32, the second for one that has BF16, too."""
MAX_REPLANS = 1
"""How often the ranks run what they have found and choose again: on one processor they only see how they disturb one another."""


def device_class(rank: int) -> str:
    """Returns the class of a rank's device; on GPUs leave that to qsync_fx, which goes by their names."""
    return CLASSES[rank % 2]


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns images of 8 x 8 pixels with their labels, to train on and to test with."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).div(16)
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


class Network(nn.Module):
    """Two convolutions and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()
        )
        self.body, self.classifier = nn.Linear(32 * 36, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.classifier(
            torch.relu(self.body(self.features(images[:, None]).flatten(1)))
        )
        return found


def tell(rank: int, model: nn.Module, right: Tensor) -> None:
    """Prints in which formats a rank trained, and how much of the test came out right."""
    ran = (
        operator
        for operator in qsync_fx.plan_coverage(model).operators
        if operator.kind == "adjustable"
    )
    formats: Any = sorted({str(operator.precision) for operator in ran})
    print(
        f"rank {rank} trained in {', '.join(formats)}, accuracy {right.float().mean():.3f}",
        flush=True,
    )
