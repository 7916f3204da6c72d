"""`qsync::quantize`: a tensor to a scaled format, and the scales.

Why an operator of its own: it reads its input twice (largest magnitude, then rounding), which is one kernel and nothing that a
compiler should take apart; and the pass pipeline shares its result among all consumers of the tensor.

Invariant: a pure function of its inputs. Randomness comes from `seed`, which the graph draws once from the rounding stream
(`qsync::draw`), so `torch.manual_seed` reproduces a run and activation checkpointing recomputes the same bits.

`qsync::dequantize`: what a quantized tensor stands for.

Between `insert_casts` and `lower` the graph multiplies dequantized operands, so that it is well typed and says what is computed;
`lower` fuses the pair into the product, and nothing of it is left at run time.

`qsync::quantize_transposed`: a matrix to a scaled format, and its transpose, in one pass.

Why: tensor cores for narrow formats read both operands along the dimension that is summed over. A gradient goes into one product by its
rows and into the other by its columns; a kernel that has just rounded it writes both for the price of a write.

Invariant: q and scale are those of `qsync::quantize`, bit for bit, so it does not matter which of the two a graph calls.
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
    """Returns the format called `fmt`; raises `PrecisionError` unless it is scaled and `x` and `keep` suit it."""
    row = precision(fmt)
    if not row.scaled:
        raise PrecisionError(
            f"{row} has no scale", where="qsync::quantize", do="use a conversion, or qsync::round"
        )
    if not x.is_floating_point():
        raise PrecisionError(
            f"{x.dtype} cannot be quantized",
            where="qsync::quantize",
            do="quantize floating-point tensors",
        )
    if keep and any(not -x.dim() <= dim < x.dim() for dim in keep):
        raise PrecisionError(
            f"a tensor of {x.dim()} dimensions cannot have a scale per index of dimensions {list(keep)}",
            where="qsync::quantize",
            do="name dimensions that it has",
        )
    return row


def quantize(
    x: Tensor, seed: Tensor, stream: int, fmt: str, rounding: str, keep: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Quantizes `x` to a scaled format such as INT8 or FP8.

    Per group, that is per index of the dimensions in `keep`, `scale = max(absmax / levels, 2**-126)` in FP32, and
    `q = round(x / scale)` on the grid of the format, saturated. A group of zeros, or without elements, has scale 1; one with NaN or
    Inf has scale NaN and q = 0, so that what is computed from it is NaN and loss scaling sees it.

    Args:
        x: floating point, any shape and strides; taken as FP32.
        seed: int64, `[1]` or `[]`.
        stream: tells operators of one graph apart.
        fmt: name of a scaled format.
        rounding: "stochastic" (QSync, section IV-A: unbiased), "nearest" (ties to even), or "floor" (towards minus infinity).
        keep: dimensions with a scale per index; none for one scale.

    Returns:
        q: the format's dtype, `x`'s shape and memory layout.
        scale: FP32, `[]` or `x`'s shape with 1 in the dimensions outside `keep`.

    Raises:
        PrecisionError: unknown or unscaled format, `x` not floating point, `keep` out of range.
        OptionError: unknown way to round.
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
    "quantize(Tensor x, Tensor seed, int stream, str fmt, str rounding, int[] keep) -> (Tensor q, Tensor scale)",
    {
        "CPU": _quantize_native,
        "CUDA": _quantize_kernel,
        # The result has no gradient; the operators that take it pass theirs to the real tensor.
        "Autograd": torch.library.fallthrough_kernel,
    },
    _quantize_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `q * scale`, computed in FP32 and rounded to `dtype`; `scale` broadcasts against `q`."""
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
    """Quantizes a matrix with one scale; see `qsync::quantize` for what is computed, the arguments and the errors.

    Args:
        x: floating point, `[M, N]`, any strides; taken as FP32.

    Returns:
        q: `[M, N]`, of `x`'s memory layout, as `qsync::quantize` gives it.
        transpose: `[N, M]`, contiguous: `q.t()`.
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
    "quantize_transposed(Tensor x, Tensor seed, int stream, str fmt, str rounding) -> (Tensor q, Tensor transpose, Tensor scale)",
    {"CPU": _quantize_transposed_native, "CUDA": _quantize_transposed_kernel},
    _quantize_transposed_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
)
