"""What predictions are held against: models whose steps take 50 to 300 ms on two cores, their training, and random mixed plans."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsync_fx import Plan

PRECISIONS = ("fp32", "bf16", "int8")
KINDS = ("singly", "skewed", "by block")


@dataclass(frozen=True)
class Case:
    """A model, its batch, and what trains it."""

    model: nn.Module
    batch: Any
    step: Callable[[Any, Any], torch.Tensor]
    optimizer: torch.optim.Optimizer


def bert(layers: int, batch: int, length: int) -> Case:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=layers, attn_implementation="eager")  # type: ignore[call-arg]
    model = BertModel(config, add_pooling_layer=False)
    given = torch.randint(30000, (batch, length)), torch.randn(batch, length, 768)

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.mse_loss(model(batch[0]).last_hidden_state.float(), batch[1])
        return loss

    return Case(model, given, step, torch.optim.AdamW(model.parameters(), lr=1e-6))


class Block(nn.Module):
    """Two convolutions and what goes past them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.down = nn.Identity() if stride == 1 and before == after else past

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: torch.Tensor = self.relu(y + self.down(x))
        return out


class ResNet18(nn.Module):
    """He et al., 2015, with two blocks a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        widths = [64, 64, 128, 256, 512]
        stages = zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
        self.stages = nn.ModuleList(nn.Sequential(Block(a, b, stride), Block(b, b, 1)) for a, b, stride in stages)
        self.fc = nn.Linear(512, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(x))
        for stage in self.stages:
            x = stage(x)
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


def vgg11_bn() -> nn.Module:
    """Simonyan and Zisserman, configuration A, with batch norms and a smaller head."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100))
    return nn.Sequential(*layers, *head)


def classifier(model: nn.Module, batch: int, size: int) -> Case:
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    return Case(model, (images, torch.randint(100, (batch,))), step, optimizer)


CASES: Mapping[str, Callable[[], Case]] = {
    "BERT 2 layers, 4 x 128 tokens": lambda: bert(2, 4, 128),
    "ResNet-18, 16 x 64 x 64": lambda: classifier(ResNet18(), 16, 64),
    "VGG-11-BN, 8 x 64 x 64": lambda: classifier(vgg11_bn(), 8, 64),
}
QUICK: Mapping[str, Callable[[], Case]] = {
    "convolution and linear layer": lambda: classifier(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 100)), 2, 8
    )
}


def mixed_plans(ids: Sequence[str], count: int, seed: int = 1) -> dict[str, Plan]:
    """Returns random plans: each operator drawn singly, most in one format, or block by block."""
    drawn, found = random.Random(seed), {}
    for at in range(count):
        kind = KINDS[at % len(KINDS)]
        usual = drawn.choice(PRECISIONS)
        blocks: dict[str, str] = {}
        chosen = {}
        for name in ids:
            if kind == "by block":
                chosen[name] = blocks.setdefault(_block(name), drawn.choice(PRECISIONS))
            else:
                alike = kind == "skewed" and drawn.random() < 0.7
                chosen[name] = usual if alike else drawn.choice(PRECISIONS)
        found[f"{at:02d} {kind}"] = Plan(operators=chosen)
    return found


def _block(name: str) -> str:
    """The block that an operator belongs to: of a stage or an encoder's layer, or of four modules in a row."""
    parts = re.match(r"(.*?)(\d+)(?:\.(\w+))?", name)
    if parts is None:
        return ""
    return f"{parts[1]}{parts[2]}.{parts[3] or ''}" if parts[1] else f"{int(parts[2]) // 4}"
