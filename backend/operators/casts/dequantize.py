"""`qsync::dequantize`: what a quantized tensor stands for.

Between `insert_casts` and `lower` the graph multiplies dequantized operands, so that it is well typed and says what is computed;
`lower` fuses the pair into the product, and nothing of it is left at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `q * scale`, computed in FP32 and rounded to `dtype`; `scale` broadcasts against `q`."""
    return (q.to(torch.float32) * scale).to(dtype)


def _fake(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(q, dtype=dtype)


define(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    {"CompositeExplicitAutograd": dequantize},
    _fake,
)
