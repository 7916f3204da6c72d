"""Model of the demo: a residual network (He et al., 2016, basic blocks) for small gray images.

The model does not depend on precisions, which the plan and the backend determine.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Residual block with two 3x3 convolutions.

    float (batch, ins, h, w) -> (batch, outs, h / stride, w / stride)
    """

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outs)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and ins == outs
            else nn.Conv2d(ins, outs, 1, stride, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, stages of one block, linear head; float (batch, 1, h, w) -> (batch, classes)."""

    def __init__(self, classes: int, width: int = 16, stages: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = [f"stage{stage}" for stage in range(1, stages + 1)]
        for stage, name in enumerate(self.stages):
            self.add_module(
                name, Block(width * 2 ** max(0, stage - 1), width * 2**stage, 1 + (stage > 0))
            )
        self.head = nn.Linear(width * 2 ** (stages - 1), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits
