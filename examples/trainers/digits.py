"""Data, network and report of the trainer examples: the handwritten digits of scikit-learn."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qsync_fx

CLASSES = ("training", "inference")
FORMATS = {"training": ["fp32"], "inference": ["fp32", "bf16"]}
"""Formats by device class.

Both ranks run on one processor: the first emulates a device that trains in FP32, the second a
device that also supports BF16.
"""
MAX_REPLANS = 1
"""Maximum rounds of running the plan and solving again.

On one processor the ranks only observe each other's interference, so one round suffices.
"""


def device_class(rank: int) -> str:
    """Return the device class of a rank; on GPUs qsync_fx derives it from the device name."""
    return CLASSES[rank % 2]


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return images of 8 x 8 pixels with labels, for training and for testing."""
    dataset = load_digits()
    images = torch.tensor(dataset.images, dtype=torch.float32).div(16)
    labels = torch.tensor(dataset.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1536], labels[:1536]), TensorDataset(images[1536:], labels[1536:])


class Network(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()
        )
        self.body, self.classifier = nn.Linear(32 * 36, 128), nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.classifier(
            torch.relu(self.body(self.features(images[:, None]).flatten(1)))
        )
        return result


def report(rank: int, model: nn.Module, right: Tensor) -> None:
    """Print the formats in which a rank trained, and its test accuracy."""
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
