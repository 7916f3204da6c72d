"""Models that are tuned and measured on a GPU: linear layers, BERT-base and ResNet-50.

    qsync tune benchmarks.gpu.models:linears --precision int8

Invariant: the benchmarks use the same shapes and dtypes, so that they run the tuned kernels.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

SQUARES = {f"{size}^3": (size, size, size) for size in (1024, 2048, 4096, 8192)}
TRANSFORMERS = {
    "BERT-base attention, 8192 tokens": (8192, 768, 768),
    "BERT-base up, 8192 tokens": (8192, 3072, 768),
    "BERT-base down, 8192 tokens": (8192, 768, 3072),
    "Llama-7B attention, 4096 tokens": (4096, 4096, 4096),
    "Llama-7B up, 4096 tokens": (4096, 11008, 4096),
    "Llama-7B down, 4096 tokens": (4096, 4096, 11008),
}
SHAPES = SQUARES | TRANSFORMERS
"""Case to m (rows of the input), n (outputs), k (inputs)."""

TINY = {"33 x 48 x 64": (33, 48, 64)}
"""Shapes for dry runs."""


def quick() -> bool:
    """Return whether this is a dry run.

    An environment variable says so, since `qsync tune` passes no arguments.
    """
    return bool(os.environ.get("QSYNC_BENCH_QUICK"))


class Linears(nn.Module):
    """Independent linear layers with BF16 parameters, each with its own input."""

    def __init__(self, shapes: dict[str, tuple[int, int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(k, n, dtype=torch.bfloat16) for _, n, k in shapes.values()
        )

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def _linears(shapes: dict[str, tuple[int, int, int]]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    shapes = TINY if quick() else shapes
    inputs = (
        torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True) for m, _, k in shapes.values()
    )
    return Linears(shapes), tuple(inputs)


def squares() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _linears(SQUARES)


def transformers() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _linears(TRANSFORMERS)


def linears() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _linears(SHAPES)


def resnet50(batch: int = 256) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return ResNet-50 (He et al., 2016), 224 x 224, channels-last; small in dry runs."""
    from transformers import ResNetConfig, ResNetForImageClassification

    settings: dict[str, Any] = {
        "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck",
        "num_labels": 1000,
    }
    size = 224
    if quick():
        settings, batch, size = (
            {"depths": [1, 1], "hidden_sizes": [32, 64], "embedding_size": 16, "num_labels": 10},
            2,
            32,
        )
    model = ResNetForImageClassification(ResNetConfig(**settings)).train()
    images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), (images,)


def bert_base(batch: int = 64, length: int = 128) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return BERT-base (Devlin et al., 2019); small in dry runs."""
    from transformers import BertConfig, BertModel

    settings: dict[str, Any] = {}
    if quick():
        settings = {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 128,
        }
        batch, length = 2, 16
    model = BertModel(BertConfig(**settings), add_pooling_layer=False).train()
    return model, (torch.randint(30000, (batch, length)),)
