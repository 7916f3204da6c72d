"""torchao's INT8 training as a peer for training steps (`pip install torchao`).

It quantizes the three products of each linear layer per row, and multiplies with `torch._int_mm` on
the CPU. Its linear layers return the dtype of their input. With FP32 weights the rest of the model
runs under autocast. With BF16 weights, as in torchao's examples, model and inputs are BF16, without
FP32 master weights.
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
    """Convert the model in place: linear layers train in INT8."""
    torchao = _torchao()
    assert torchao is not None, "importable"
    general, training = torchao
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
    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(converted, args)), {name: converted(value) for name, value in kwargs.items()}
