"""Quantization of tensors to scaled formats, and dequantization.

`qsync::quantize` reads its input twice, for the largest magnitude and for rounding, in one opaque
kernel; the pass pipeline shares its result among all consumers. `qsync::quantize_transposed` also
writes the transpose: tensor cores for narrow formats read both operands along the contracted
dimension, so one backward product reads a gradient by rows and the other by columns. Both return
the same bits. `qsync::dequantize` makes the graph well typed between the passes `insert_casts` and
`lower`; `lower` fuses it into the product.

Invariant: pure functions. The graph draws `seed` once per step (`qsync::draw`), so
`torch.manual_seed` reproduces a run, and activation checkpointing recomputes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.numerics import native, reference
from qsync_fx.backend.operators.registration import define
from qsync_fx.errors import PrecisionError
from qsync_fx.formats import Precision, precision
from qsync_fx.rounding import rounding_mode


def scaled_format(fmt: str, x: Tensor, keep: Sequence[int]) -> Precision:
    """Return the format `fmt`; raise `PrecisionError` if it is unscaled or does not fit `x`."""
    row = precision(fmt)
    if not row.scaled:
        raise PrecisionError(
            f"{row} has no scale", where="qsync::quantize", do="convert it, or use qsync::round"
        )
    if not x.is_floating_point():
        raise PrecisionError(
            f"{x.dtype} cannot be quantized",
            where="qsync::quantize",
            do="quantize floating-point tensors",
        )
    if keep and any(not -x.dim() <= dim < x.dim() for dim in keep):
        raise PrecisionError(
            f"a tensor of {x.dim()} dimensions cannot have a scale per index of the dimensions "
            f"{list(keep)}",
            where="qsync::quantize",
            do="use dimensions that the tensor has",
        )
    return row


def quantize(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Quantize `x` to a scaled format such as INT8 or FP8.

    Each index of the dimensions in `keep` is a group with `scale = max(absmax / levels, 2**-126)`
    in FP32 and `q = round(x / scale)`, saturated to the format's grid. All-zero and empty groups
    have scale 1. Groups with NaN or Inf have scale NaN and q = 0, so that dependent results are NaN
    and loss scaling detects them.

    Args:
        x: floating point, any shape and strides; read as FP32.
        seed: int64, `[1]` or `[]`.
        stream: distinguishes operators of one graph.
        fmt: name of a scaled format.
        rounding: "stochastic" (unbiased; QSync, section IV-A), "nearest" (ties to even) or "floor"
            (towards minus infinity).
        keep: dimensions with a scale per index; empty for one scale.

    Returns:
        q: the format's dtype, shape and memory layout of `x`.
        scale: FP32, `[]` or the shape of `x` with 1 in the dimensions outside `keep`.

    Raises:
        PrecisionError: unknown or unscaled format, `x` not floating point, `keep` out of range.
        OptionError: unknown rounding mode.
    """
    result: tuple[Tensor, Tensor] = torch.ops.qsync.quantize.default(
        x, seed, stream, fmt, rounding, list(keep)
    )
    return result


def _quantize_fake(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    row = scaled_format(fmt, x, keep)
    rounding_mode(rounding)
    q = reference.empty_quantized(x, row.dtype)
    return q, x.new_empty(reference.scale_shape(x, keep), dtype=torch.float32)


def _quantize_kernel(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    result: Any = quantize_launch.again(x, seed, stream, fmt, rounding, keep)
    if result is None:
        result = quantize_launch.quantize(
            x, seed, stream, scaled_format(fmt, x, keep), rounding_mode(rounding), keep
        )
    return result  # type: ignore[no-any-return]


def _quantize_native(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return native.quantize(
        x, seed, stream, scaled_format(fmt, x, keep), rounding_mode(rounding), keep
    )


define(
    "quantize(Tensor x, Tensor seed, int stream, str fmt, str rounding, int[] keep) -> (Tensor "
    "q, Tensor scale)",
    {
        "CPU": _quantize_native,
        "CUDA": _quantize_kernel,
        # The result has no gradient; its consumers pass theirs to the original tensor.
        "Autograd": torch.library.fallthrough_kernel,
    },
    _quantize_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `q * scale` as `dtype`, computed in FP32; `scale` broadcasts against `q`."""
    return (q.to(torch.float32) * scale).to(dtype)


def _dequantize_fake(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(q, dtype=dtype)


define(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    {"CompositeExplicitAutograd": dequantize},
    _dequantize_fake,
)


def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix with one scale, and return the transpose too; see `quantize`.

    Args:
        x: floating point, `[M, N]`, any strides; read as FP32.

    Returns:
        q: `[M, N]`, as `quantize` returns it.
        transpose: `q.t()`, `[N, M]`, contiguous.
        scale: FP32, `[]`.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.qsync.quantize_transposed.default(
        x, seed, stream, fmt, rounding
    )
    return result


def _quantize_transposed_fake(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    row = scaled_format(fmt, x, ())
    rounding_mode(rounding)
    rows, columns = x.shape
    q = reference.empty_quantized(x, row.dtype)
    return q, x.new_empty((columns, rows), dtype=row.dtype), x.new_empty((), dtype=torch.float32)


def _quantize_transposed_native(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = native.quantize(
        x, seed, stream, scaled_format(fmt, x, ()), rounding_mode(rounding), ()
    )
    return q, q.t().clone(memory_format=torch.contiguous_format), scale


def _quantize_transposed_kernel(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    result: Any = quantize_launch.again(x, seed, stream, fmt, rounding, transposed=True)
    if result is None:
        result = quantize_launch.quantize_transposed(
            x, seed, stream, scaled_format(fmt, x, ()), rounding_mode(rounding)
        )
    return result  # type: ignore[no-any-return]


define(
    "quantize_transposed(Tensor x, Tensor seed, int stream, str fmt, str rounding) -> (Tensor q, "
    "Tensor transpose, Tensor scale)",
    {"CPU": _quantize_transposed_native, "CUDA": _quantize_transposed_kernel},
    _quantize_transposed_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
)
