"""Batch of small images for training tests, and gradient tolerances of each format."""

from __future__ import annotations

import torch
from torch import Tensor

PRECISIONS = ["fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int8_grad"]
# Relative error of all gradients against FP32: a few steps of each format with small models.
ERRORS = {
    "fp32": 0.0,
    "tf32": 0.01,
    "bf16": 0.03,
    "fp16": 0.03,
    "fp8": 0.4,
    "int8": 0.15,
    "int8_grad": 0.2,
}


def batch(n: int = 32, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 8, 8, generator=generator), torch.randint(
        10, (n,), generator=generator
    )
