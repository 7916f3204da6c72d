"""Rounding of tensors to number formats, and the random seed of a graph.

`qsync::quantize` rounds to scaled formats, `qsync::round` to others; `qsync::draw` draws a seed.
Invariant: apart from `draw` pure functions, so `torch.manual_seed` reproduces a run, and activation
checkpointing recomputes the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda.runtime import quantize_launch
from qsync_fx.backend.numerics import native, reference
from qsync_fx.backend.operators.registration import define, differentiate
from qsync_fx.errors import PrecisionError
from qsync_fx.formats import FP32, Precision, precision
from qsync_fx.rounding import rounding_mode, rounding_stream, watch


def scaled_format(fmt: str, x: Tensor, keep: Sequence[int]) -> Precision:
    """Return the format `fmt`; raise `PrecisionError` if it is unscaled or does not fit `x`."""
    row, where = precision(fmt), "qsync::quantize"
    if not row.scaled:
        raise PrecisionError(
            f"{row} has no scale", where=where, do="convert it, or use qsync::round"
        )
    if not x.is_floating_point():
        raise PrecisionError(
            f"{x.dtype} cannot be quantized", where=where, do="quantize floating-point tensors"
        )
    if keep and any(not -x.dim() <= dim < x.dim() for dim in keep):
        raise PrecisionError(
            f"a tensor of {x.dim()} dimensions cannot have a scale per index of the dimensions "
            f"{list(keep)}",
            where=where,
            do="use dimensions that the tensor has",
        )
    return row


def _quantize_fake(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    row = scaled_format(fmt, x, keep)
    rounding_mode(rounding)
    q = reference.empty_quantized(x, row.dtype)
    return q, x.new_empty(reference.scale_shape(x, keep), dtype=torch.float32)


def _quantize_kernel(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> Any:
    result = quantize_launch.again(x, seed, stream, fmt, rounding, keep)
    if result is not None:
        return result
    row = scaled_format(fmt, x, keep)
    return quantize_launch.quantize(x, seed, stream, row, rounding_mode(rounding), keep)


@define(
    "quantize(Tensor x, Tensor seed, int stream, str fmt, str rounding, int[] keep) -> (Tensor "
    "q, Tensor scale)",
    "CPU",
    _quantize_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
    CUDA=_quantize_kernel,
    # The result has no gradient; its consumers pass theirs to the original tensor.
    Autograd=torch.library.fallthrough_kernel,
)
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
    row = scaled_format(fmt, x, keep)
    return native.quantize(x, seed, stream, row, rounding_mode(rounding), keep)


@define(
    "dequantize(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    fake=lambda q, scale, dtype: torch.empty_like(q, dtype=dtype),
)
def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `q * scale` as `dtype`, computed in FP32; `scale` broadcasts against `q`.

    It makes the graph well typed until the pass `lower` fuses it into a product.
    """
    return (q.to(torch.float32) * scale).to(dtype)


def _quantize_transposed_fake(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = _quantize_fake(x, seed, stream, fmt, rounding, ())
    return q, x.new_empty((x.shape[1], x.shape[0]), dtype=q.dtype), scale


def _quantize_transposed_kernel(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> Any:
    result = quantize_launch.again(x, seed, stream, fmt, rounding, transposed=True)
    if result is not None:
        return result
    row = scaled_format(fmt, x, ())
    return quantize_launch.quantize_transposed(x, seed, stream, row, rounding_mode(rounding))


@define(
    "quantize_transposed(Tensor x, Tensor seed, int stream, str fmt, str rounding) -> (Tensor q, "
    "Tensor transpose, Tensor scale)",
    "CPU",
    _quantize_transposed_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
    CUDA=_quantize_transposed_kernel,
)
def quantize_transposed(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix, `[M, N]`, with one scale; return `q`, `q.t()`, contiguous, and the scale.

    Tensor cores read both operands along the contracted dimension: one backward product reads a
    gradient by rows, the other by columns. Same bits as `quantize`.
    """
    row = scaled_format(fmt, x, ())
    q, scale = native.quantize(x, seed, stream, row, rounding_mode(rounding), ())
    return q, q.t().clone(memory_format=torch.contiguous_format), scale


def gridded_format(fmt: str, x: Tensor) -> Precision:
    """Return the format `fmt`; raise `PrecisionError` if `qsync::round` cannot round `x` to it."""
    row, where = precision(fmt), "qsync::round"
    problem = f"qsync::round does not support the format {row}"
    if row.scaled:
        raise PrecisionError(problem, where=where, do="use qsync::quantize")
    if row.plain and row.bits >= 32:
        raise PrecisionError(problem, where=where, do=f"convert to {row.dtype}")
    if not x.is_floating_point():
        raise PrecisionError(
            f"{x.dtype} cannot be rounded to {row}", where=where, do="round floating-point tensors"
        )
    # Too large values become infinite in the cast to a plain format, as loss scaling expects.
    if row.plain:
        return dataclasses.replace(row, max=FP32.max)
    return row


def _round_fake(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> Tensor:
    rounding_mode(rounding)
    return torch.empty_like(x, dtype=gridded_format(fmt, x).dtype)


def _round_reference(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> Tensor:
    return reference.round_to(x, seed, stream, gridded_format(fmt, x), rounding_mode(rounding))


@define(
    "round(Tensor x, Tensor seed, int stream, str fmt, str rounding) -> Tensor",
    "CPU",
    _round_fake,
    CUDA=_round_reference,
)
def round_to(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> Tensor:
    """Round `x` to the grid of an unscaled format, such as TF32, or to a 16-bit dtype.

    NaN and Inf are preserved. Too large values become the largest of the format, or infinite for
    dtypes of torch. The gradient is straight-through: the planner accounts for the error.

    Args:
        x: floating point, any shape and strides; read as FP32.
        fmt: name of an unscaled format below 32 bits: "tf32", "bf16", "fp16".
        seed, stream, rounding: as in `quantize`.

    Returns:
        The format's dtype (FP32 for TF32), shape and memory layout of `x`.

    Raises:
        PrecisionError: unknown, scaled or wide format, or `x` not floating point.
        OptionError: unknown rounding mode.
    """
    return native.round_to(x, seed, stream, gridded_format(fmt, x), rounding_mode(rounding))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype
    # An unused result has no gradient; do not create zeros for it.
    ctx.set_materialize_grads(False)


def _straight_through(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    return None if gradient is None else gradient.to(ctx.dtype), None, None, None, None


differentiate("round", _straight_through, _remember)


@define(
    "draw(Device device) -> Tensor",
    fake=lambda device: torch.empty([1], dtype=torch.int64, device=device),
    # The second tag excludes it from the CUDA graphs of torch.compile.
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
)
def draw(device: torch.device) -> Tensor:
    """Return the seed of a step, int64, `[1]`, from `qsync_fx.rounding_stream`.

    It does not synchronize with the device. In a manual capture (`torch.cuda.graph`) it draws from
    torch's CUDA generator, which advances with each replay.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.randint(2**62, [1], dtype=torch.int64, device=device)
    return torch.full([1], rounding_stream.draw(), dtype=torch.int64, device=device)


# States of torch's generator record a position in the rounding stream from here on.
watch()
