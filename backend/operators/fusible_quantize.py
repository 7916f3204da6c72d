"""`qsync::quantize` in operators that a compiler fuses, for CUDA devices that no kernel of ours can be had for.

Written so it is what any reduction and the pass after it are: the largest magnitude is found in one kernel, and one more reads the values,
divides, draws and rounds. The operator itself would be two hundred launches of torch there, with a tensor of eight bytes an element
between each two of them. Two of its parts are operators, since a compiler would make something else of what they are written in:

    qsync::uniform   random numbers: written out, each of ten rounds is a tensor of integers that others read twice
    qsync::divide    a division that is rounded once: compilers for GPUs divide with an error of two units in the last place

`qsync_fx.backend.inductor.quantize_lowerings` says how Inductor computes both.

Invariant: the bits of `qsync::quantize` on a CUDA device, so it does not matter which of the two a graph holds.
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
    """Returns `philox.uniform` for a tensor of a size and strides, which fills its memory without gaps: FP32."""
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
    """Returns `a / b` of FP32 tensors, rounded once; they broadcast."""
    result: Tensor = torch.ops.qsync.divide.default(a, b)
    return result


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b


define("divide(Tensor a, Tensor b) -> Tensor", {"CompositeExplicitAutograd": _divide}, _divide)


def quantize(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns `(q, scale)`; see `qsync::quantize`. `x` has values."""
    row, mode = scaled_format(fmt, x, keep), rounding_mode(rounding)
    q = reference.empty_quantized(x, row.dtype)
    scale = reference.scales(x, row, keep, divide)
    random = uniform(q.size(), q.stride(), seed, stream) if mode == "stochastic" else None
    rounded = reference.to_grid(divide(x.float(), scale), row, mode, random)
    return torch.where(scale.isnan(), torch.zeros_like(rounded), rounded).to(row.dtype), scale


def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(q, transpose, scale)`; see `qsync::quantize_transposed`."""
    q, scale = quantize(x, seed, stream, fmt, rounding, ())
    return q, q.t().clone(memory_format=torch.contiguous_format), scale
