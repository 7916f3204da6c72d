"""Copies of quantized tensors in another layout or dtype: `qsync::convert` and `qsync::carry`.

`qsync::convert` transposes, pads and casts a matrix in one pass. Units for narrow formats read both
operands along the contracted dimension, in steps of 16 bytes, and saved tensors seldom have such a
layout. The result is the same on every device; copies preserve every bit, also of NaN.

`qsync::carry` casts a quantized tensor to the compute dtype in the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.operators.registration import define, require
from qsync_fx.errors import PrecisionError
from qsync_fx.formats import FORMATS

TYPES = tuple(FORMATS[name].dtype for name in codegen.NUMBERS)
FLOATS = tuple(FORMATS[name].dtype for name in codegen.FLOATS)


def convert(
    x: Tensor,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    transposed: bool = False,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Return `y[r, c] = dtype(x[r, c] * scale)`, or of `x[c, r]` if transposed, padded with zeros.

    The value is computed in FP32 and rounded once, to nearest, ties to even; overflow gives
    infinity. Without a scale, and with the dtype of `x`, it is a copy of the bits. It has no
    gradient.

    Args:
        x: INT8, FP8 (E4M3, E5M2), FP16, BF16 or FP32, `[M, N]`, any strides; a kernel reads
            row-major or column-major matrices.
        dtype: FP16, BF16 or FP32, or the dtype of `x`, which is the default.
        scale: FP32, `[]` or `[1]`, on the device of `x`; 1 by default. With a scale the result is a
            float.
        transposed: whether `y` is the transpose.
        shape: of the result, at least the default, the shape of `x` or its transpose.

    Returns:
        `[R, C]`, contiguous.

    Raises:
        PrecisionError: unsupported dtypes.
        RuntimeError: `x` is no matrix, `scale` is not one FP32 number on the same device, or
            `shape` is too small.
    """
    sizes = list(x.shape[::-1] if transposed else x.shape) if shape is None else list(shape)
    result: Tensor = torch.ops.qsync.convert.default(x, dtype or x.dtype, scale, transposed, sizes)
    return result


def _checked(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: Sequence[int]
) -> None:
    where = "qsync::convert"
    if x.dtype not in TYPES:
        raise PrecisionError(
            f"{x.dtype} cannot be converted",
            where=where,
            do="pass integers, or floats that layers support",
        )
    if dtype not in FLOATS and (scale is not None or dtype != x.dtype):
        raise PrecisionError(
            f"{x.dtype} cannot become {dtype}{'' if scale is None else ' with a scale'}",
            where=where,
            do="convert to float16, bfloat16 or float32; use qsync::quantize for narrower types",
        )
    require(
        x.dim() == 2 and len(shape) == 2,
        lambda: f"{where}: needs a 2-d input and shape, not {x.dim()} and {len(shape)} dimensions",
    )
    if scale is not None:
        item = (
            scale.numel() == 1
            and scale.dim() < 2
            and scale.dtype == torch.float32
            and scale.device == x.device
        )
        require(item, lambda: f"{where}: the scale must be a single FP32 number on {x.device}")
    rows, columns = (x.shape[1], x.shape[0]) if transposed else x.shape
    enough = (shape[0] >= rows, shape[1] >= columns)
    for fits in enough:
        require(
            fits,
            lambda: f"{where}: {rows} x {columns} values do not fit into {shape[0]} x {shape[1]}",
        )


def _convert_fake(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: Sequence[int]
) -> Tensor:
    _checked(x, dtype, scale, transposed, shape)
    return x.new_empty(list(shape), dtype=dtype)


def _by_torch(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: Sequence[int]
) -> Tensor:
    from qsync_fx.backend.cuda.problem.padding import laid_out

    _checked(x, dtype, scale, transposed, shape)
    straight = x.t() if transposed else x
    values = straight if scale is None else straight.to(torch.float32) * scale
    return laid_out(values.to(dtype), shape[0], shape[1], "row")


def _kernel(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: Sequence[int]
) -> Tensor:
    from qsync_fx.backend.cuda.runtime import layout_convert

    _checked(x, dtype, scale, transposed, shape)
    result = (
        layout_convert.convert(x, scale, dtype, transposed, (shape[0], shape[1]))
        if x.numel()
        else None
    )
    return _by_torch(x, dtype, scale, transposed, shape) if result is None else result


define(
    "convert(Tensor x, ScalarType dtype, Tensor? scale, bool transposed, SymInt[] shape) -> Tensor",
    {
        "CPU": _by_torch,
        "CUDA": _kernel,
        "Autograd": torch.library.fallthrough_kernel,
    },
    _convert_fake,
)


def carry(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `q`, any shape and strides, cast to `dtype`, in which each is exact.

    The forward pass uses this operator so that the quantized tensor is saved for backward. A
    joint-graph partitioner that sees the same cast in both passes saves its result, which is twice
    as large, and it counts a tensor that only casts read as not materialized, so that saving it
    looks expensive. No fusion is lost: the neighbours are opaque kernels.
    """
    return q if q.dtype == dtype else torch.ops.qsync.carry.default(q, dtype)


def _convert(q: Tensor, dtype: torch.dtype) -> Tensor:
    return q.to(dtype, copy=True)


def _carry_fake(q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(q, dtype=dtype)


define(
    "carry(Tensor q, ScalarType dtype) -> Tensor",
    {"CompositeExplicitAutograd": _convert},
    _carry_fake,
)
