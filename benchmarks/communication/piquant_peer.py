"""piquant's stochastic quantizer as a peer of the gradient codecs (`pip install pypiquant`).

piquant uses one scale for all values, which a separate pass computes. The codecs of qsync_fx
compute one scale per unit while they encode.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Calls = Mapping[str, Callable[[], object]]


def encoders(values: Tensor) -> dict[int, Calls]:
    """Return calls that quantize FP32 values, by number of bits; empty if piquant is not installed.

    They use torch's number of threads: "piquant" with a given scale, "piquant, scale found" with
    the computation of the scale.
    """
    try:
        piquant: Any = importlib.import_module("piquant")
    except ImportError:
        return {}
    context = piquant.Context(torch.get_num_threads())
    return {bits: _encoder(piquant, context, values, bits) for bits in (8, 4, 2)}


def _encoder(piquant: Any, context: Any, values: Tensor, bits: int) -> Calls:
    kinds, modes = piquant.DataType, piquant.RoundMode
    to, count = getattr(kinds, f"UINT{bits}"), values.numel()
    made = torch.zeros(-(-count * bits // 8), dtype=torch.uint8)

    def scale() -> tuple[float, int]:
        parameters: tuple[float, int] = context.compute_quant_params_ptr_float32(
            values.data_ptr(), to, count
        )
        return parameters

    def quantize(parameters: tuple[float, int]) -> None:
        given_to = values.data_ptr(), kinds.F32, made.data_ptr(), to, count
        context.quantize_ptr(*given_to, *parameters, modes.STOCHASTIC)

    parameters = scale()
    return {
        "piquant": lambda: quantize(parameters),
        "piquant, scale found": lambda: quantize(scale()),
    }
