"""Rounding to unscaled formats (`qsync::round`) and the random seed of a graph (`qsync::draw`).

`qsync::round` rounds to a grid without a torch dtype, such as TF32, or to a 16-bit dtype, to which
torch only rounds to nearest. It is a pure function with a straight-through gradient: the planner
accounts for its error.

`qsync::draw` fills the seed of a step from `qsync_fx.rounding_stream`. It is an operator since the
seed changes each step, and since it depends on the process that runs the graph (rank, position in
the stream), which may not be the process that compiled it. It does not synchronize with the device.
A tag excludes it from the CUDA graphs of torch.compile. In a manual capture (`torch.cuda.graph`) it
draws from torch's CUDA generator, which advances with each replay.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.numerics import native, reference
from qsync_fx.backend.operators.registration import define, differentiate
from qsync_fx.errors import PrecisionError
from qsync_fx.formats import FP32, Precision, precision
from qsync_fx.rounding import rounding_mode, rounding_stream, watch


def _draw(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.randint(2**62, [1], dtype=torch.int64, device=device)
    return torch.full([1], rounding_stream.draw(), dtype=torch.int64, device=device)


def _draw_fake(device: torch.device) -> Tensor:
    return torch.empty([1], dtype=torch.int64, device=device)


define(
    "draw(Device device) -> Tensor",
    {"CompositeExplicitAutograd": _draw},
    _draw_fake,
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
)
# States of torch's generator record a position in the rounding stream from here on.
watch()


def gridded_format(fmt: str, x: Tensor) -> Precision:
    """Return the format `fmt`; raise `PrecisionError` if `qsync::round` cannot round `x` to it.

    Plain formats get FP32's range here: values beyond their own become infinite in the cast, as
    loss scaling expects.
    """
    row = precision(fmt)
    if row.scaled or (row.plain and row.bits >= 32):
        raise PrecisionError(
            f"qsync::round does not support the format {row}",
            where="qsync::round",
            do="use qsync::quantize" if row.scaled else f"convert to {row.dtype}",
        )
    if not x.is_floating_point():
        raise PrecisionError(
            f"{x.dtype} cannot be rounded to {row}",
            where="qsync::round",
            do="round floating-point tensors",
        )
    return dataclasses.replace(row, max=FP32.max) if row.plain else row


def round_to(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> Tensor:
    """Round `x` to the grid of an unscaled format.

    NaN and Inf are preserved. Too large values become the largest of the format, or infinite for
    dtypes of torch.

    Args:
        x: floating point, any shape and strides; read as FP32.
        seed: int64, `[1]` or `[]`.
        stream: distinguishes operators of one graph.
        fmt: name of an unscaled format below 32 bits: "tf32", "bf16", "fp16".
        rounding: "stochastic", "nearest" (ties to even) or "floor" (towards minus infinity).

    Returns:
        The format's dtype (FP32 for TF32), shape and memory layout of `x`.

    Raises:
        PrecisionError: unknown, scaled or wide format, or `x` not floating point.
        OptionError: unknown rounding mode.
    """
    result: Tensor = torch.ops.qsync.round.default(x, seed, stream, fmt, rounding)
    return result


def _round_fake(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> Tensor:
    rounding_mode(rounding)
    return torch.empty_like(x, dtype=gridded_format(fmt, x).dtype)


def _reference(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> Tensor:
    return reference.round_to(x, seed, stream, gridded_format(fmt, x), rounding_mode(rounding))


def _native(x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str) -> Tensor:
    return native.round_to(x, seed, stream, gridded_format(fmt, x), rounding_mode(rounding))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype
    # An unused result has no gradient; do not create zeros for it.
    ctx.set_materialize_grads(False)


def _straight_through(
    ctx: Any, gradient: Tensor | None
) -> tuple[Tensor | None, None, None, None, None]:
    return None if gradient is None else gradient.to(ctx.dtype), None, None, None, None


define(
    "round(Tensor x, Tensor seed, int stream, str fmt, str rounding) -> Tensor",
    {"CPU": _native, "CUDA": _reference},
    _round_fake,
)
differentiate("round", _straight_through, _remember)
