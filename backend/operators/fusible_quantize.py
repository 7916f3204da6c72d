"""Quantization in operators that a compiler fuses, for CUDA devices without a quantization kernel.

Inductor generates two kernels, a reduction and a pointwise pass; operator by operator it would be
two hundred launches with intermediates of 8 bytes per element. Two parts are opaque operators that
`qsync_fx.backend.inductor.quantize_lowerings` lowers:

- `qsync::uniform`: random numbers, whose ten rounds would be integer tensors that are read twice;
- `qsync::divide`: division rounded once; GPU compilers divide with an error of 2 ulp.

Invariant: the bits of `qsync::quantize` on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

from qsync_fx.backend.numerics import philox, reference
from qsync_fx.backend.operators.quantize import scaled_format
from qsync_fx.backend.operators.registration import define
from qsync_fx.rounding import rounding_mode


def uniform(
    size: Sequence[int | SymInt], stride: Sequence[int | SymInt], seed: Tensor, stream: int
) -> Tensor:
    """Return `philox.uniform`, FP32, for a tensor of this size and dense strides."""
    result: Tensor = torch.ops.qsync.uniform.default(size, stride, seed, stream)
    return result


def _uniform(size: Sequence[int], stride: Sequence[int], seed: Tensor, stream: int) -> Tensor:
    return philox.uniform(torch.empty_strided(size, stride, device=seed.device), seed, stream)


def _uniform_fake(
    size: Sequence[int | SymInt], stride: Sequence[int | SymInt], seed: Tensor, stream: int
) -> Tensor:
    return torch.empty_strided(size, stride, device=seed.device)


define(
    "uniform(SymInt[] size, SymInt[] stride, Tensor seed, int stream) -> Tensor",
    {"CompositeExplicitAutograd": _uniform},
    _uniform_fake,
)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Return `a / b` of FP32 tensors that broadcast, rounded once."""
    result: Tensor = torch.ops.qsync.divide.default(a, b)
    return result


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b


define("divide(Tensor a, Tensor b) -> Tensor", {"CompositeExplicitAutograd": _divide}, _divide)


def quantize(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return `(q, scale)` as `qsync::quantize` does; `x` is not empty."""
    row, mode = scaled_format(fmt, x, keep), rounding_mode(rounding)
    q = reference.empty_quantized(x, row.dtype)
    scale = reference.scales(x, row, keep, divide)
    random = uniform(q.size(), q.stride(), seed, stream) if mode == "stochastic" else None
    rounded = reference.to_grid(divide(x.float(), scale), row, mode, random)
    return torch.where(scale.isnan(), torch.zeros_like(rounded), rounded).to(row.dtype), scale


def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(q, transpose, scale)` as `qsync::quantize_transposed` does."""
    q, scale = quantize(x, seed, stream, fmt, rounding, ())
    return q, q.t().clone(memory_format=torch.contiguous_format), scale
