"""Small network, and its explanation with custom passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsync_fx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.body(x)))


def explain(*passes: object, precision: str = "bf16") -> qsync_fx.Explanation:
    return qsync_fx.explain(
        Net(), torch.randn(2, 8), options={"precision": precision, "passes": list(passes)}
    )
