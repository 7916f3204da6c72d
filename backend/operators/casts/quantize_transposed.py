"""`qsync::quantize_transposed`: a matrix to a scaled format, and its transpose, in one pass.

Why: tensor cores for narrow formats read both operands along the dimension that is summed over. A gradient goes into one product by its
rows and into the other by its columns; a kernel that has just rounded it writes both for the price of a write.

Invariant: q and scale are those of `qsync::quantize`, bit for bit, so it does not matter which of the two a graph calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda.run import quantizing
from qsync_fx.backend.numerics import native, reference
from qsync_fx.backend.operators.casts.quantize import scaled_format
from qsync_fx.backend.operators.library import define
from qsync_fx.rounding.mode import rounding_mode


def quantize_transposed(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes a matrix with one scale; see `qsync::quantize` for what is computed, the arguments and the errors.

    Args:
        x: floating point, `[M, N]`, any strides; taken as FP32.

    Returns:
        q: `[M, N]`, of `x`'s memory layout, as `qsync::quantize` gives it.
        transpose: `[N, M]`, contiguous: `q.t()`.
        scale: FP32, `[]`.
    """
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.qsync.quantize_transposed.default(x, seed, stream, fmt, rounding)
    return found


def _fake(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    row = scaled_format(fmt, x, ())
    rounding_mode(rounding)
    rows, columns = x.shape
    q = reference.empty_quantized(x, row.dtype)
    return q, x.new_empty((columns, rows), dtype=row.dtype), x.new_empty((), dtype=torch.float32)


def _native(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = native.quantize(x, seed, stream, scaled_format(fmt, x, ()), rounding_mode(rounding), ())
    return q, q.t().clone(memory_format=torch.contiguous_format), scale


def _kernel(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    found: Any = quantizing.again(x, seed, stream, fmt, rounding, turned=True)
    if found is None:
        found = quantizing.quantize_transposed(x, seed, stream, scaled_format(fmt, x, ()), rounding_mode(rounding))
    return found  # type: ignore[no-any-return]


define(
    "quantize_transposed(Tensor x, Tensor seed, int stream, str fmt, str rounding) -> (Tensor q, Tensor transpose, Tensor scale)",
    {"CPU": _native, "CUDA": _kernel},
    _fake,
    tags=(),  # See `qsync_fx.backend.inductor.tuned`.
)
