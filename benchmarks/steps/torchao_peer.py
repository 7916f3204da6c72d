"""torchao's training in INT8 as a peer of whole steps, where `pip install torchao` has put it.

It quantizes the three products of each linear layer, row by row, and multiplies them by `torch._int_mm` on the CPU; what else there is runs
as it would without it. Its linear layers give out the type that they are given: with `weights` of FP32 the rest is autocast's, with weights
in BF16, which its own examples take, all of the model and of what it is given is BF16, and no weights are held wider.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

MODULES = "torchao.quantization", "torchao.prototype.quantized_training"


def importable() -> bool:
    return _torchao() is not None


def quantized(model: nn.Module, weights: torch.dtype) -> nn.Module:
    """Returns a model whose linear layers train in INT8, in place."""
    found = _torchao()
    assert found is not None, "importable"
    general, training = found
    model.to(weights)
    if weights is not torch.float32:
        model.register_forward_pre_hook(
            lambda _, args, kwargs: _converted(weights, args, kwargs), with_kwargs=True
        )
    general.quantize_(model, training.int8_mixed_precision_training())
    return model


def _torchao() -> tuple[Any, Any] | None:
    try:
        general, training = map(importlib.import_module, MODULES)
    except ImportError:
        return None
    return general, training


def _converted(
    dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}
