"""`qsync::round`: a tensor to the grid of a format without a scale: one that no torch type is, such as TF32, or a type of 16 bits, which
torch converts to by the nearest value only.

Invariant: a pure function of its inputs, as `qsync::quantize` is. The gradient passes straight through: rounding to a format is the
identity to the model, and its error is what the planner accounts for.

`qsync::draw`: the seed of a graph's roundings in one step, from the rounding stream (`qsync_fx.rounding`).

Why an operator: the number is another one at each step, so it cannot be a constant of the graph; and it belongs to the process that runs
the graph, rank and place in the stream included, so it cannot be decided when the graph is compiled, which other processes may have done.

Invariant: it reads no tensor and copies none: a fill with a number that the host knows, which waits for no device. What would record it
once and repeat the record, as the CUDA graphs of torch.compile do, is told not to. A user who captures a step by hand
(`torch.cuda.graph`) records it all the same: then it is torch's own generator on the device that draws, which moves on with each replay.
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
# With the operator: whatever states of torch's generator are taken from now on, they know a place in the stream.
watch()


def gridded_format(fmt: str, x: Tensor) -> Precision:
    """Returns the format called `fmt`; raises `PrecisionError` if it is scaled, or as wide as what is rounded.

    Torch's own types have infinities, and what is beyond their range becomes one, as loss scaling expects: FP32's range is theirs here.
    """
    row = precision(fmt)
    if row.scaled or (row.plain and row.bits >= 32):
        raise PrecisionError(
            f"{row} is not a format that qsync::round makes",
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
    """Rounds `x` to the grid of an unscaled format; NaN and Inf stay, and what is too large becomes the format's largest or infinite.

    Args:
        x: floating point, any shape and strides; taken as FP32.
        seed: int64, `[1]` or `[]`.
        stream: tells operators of one graph apart.
        fmt: name of an unscaled format of less than 32 bits: "tf32", "bf16", "fp16".
        rounding: "stochastic", "nearest" (ties to even, what tensor cores' callers do), or "floor" (towards minus infinity).

    Returns:
        The format's storage type (FP32 for TF32, BF16 for BF16), `x`'s shape and memory layout.

    Raises:
        PrecisionError: unknown, scaled or wide format, `x` not floating point.
        OptionError: unknown way to round.
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
    # What consumes the rounded tensor may give it no gradient; zeros would then be made and added for nothing.
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
