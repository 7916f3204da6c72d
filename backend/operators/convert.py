"""Copies of tensors in another layout or dtype: `qsync::convert`, `qsync::carry`, `in_order`.

Units for narrow formats read both operands along the contracted dimension, in steps of 16 bytes.
The results are the same on every device, and copies preserve every bit, also of NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.operators.registration import define, require
from qsync_fx.errors import PrecisionError
from qsync_fx.formats import FORMATS
from qsync_fx.torch_internals import suggest_memory_format

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
        scale: FP32, `[]` or `[1]`, on the device of `x`; the result is then a float.
        transposed: whether `y` is the transpose.
        shape: of the result, at least the default, the shape of `x` or its transpose.

    Returns:
        `[R, C]`, contiguous.

    Raises:
        PrecisionError: unsupported dtypes.
        RuntimeError: `x` is no matrix, `scale` is not one FP32 number on the same device, or
            `shape` is too small.
    """
    if shape is None:
        shape = x.shape[::-1] if transposed else x.shape
    result: Tensor = torch.ops.qsync.convert.default(x, dtype or x.dtype, scale, transposed, shape)
    return result


def _convert_fake(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: Sequence[int]
) -> Tensor:
    where = "qsync::convert"
    if x.dtype not in TYPES:
        raise PrecisionError(
            f"{x.dtype} cannot be converted",
            where=where,
            do="pass integers, or floats that layers support",
        )
    if dtype not in FLOATS and (scale is not None or dtype != x.dtype):
        raise PrecisionError(
            f"{x.dtype} cannot become {dtype}{' with a scale' * (scale is not None)}",
            where=where,
            do="convert to float16, bfloat16 or float32; use qsync::quantize for narrower types",
        )
    require(
        x.dim() == 2 and len(shape) == 2,
        lambda: f"{where}: needs a 2-d input and shape, not {x.dim()} and {len(shape)} dimensions",
    )
    if scale is not None:
        expected = scale.numel(), scale.dim() < 2, scale.dtype, scale.device
        require(
            expected == (1, True, torch.float32, x.device),
            lambda: f"{where}: the scale must be a single FP32 number on {x.device}",
        )
    sizes = x.shape[::-1] if transposed else x.shape
    for size, least in zip(shape, sizes, strict=True):
        require(
            size >= least,
            lambda: (
                f"{where}: {sizes[0]} x {sizes[1]} values do not fit into {shape[0]} x {shape[1]}"
            ),
        )
    return x.new_empty(list(shape), dtype=dtype)


@define(
    "convert(Tensor x, ScalarType dtype, Tensor? scale, bool transposed, SymInt[] shape) -> Tensor",
    fake=_convert_fake,
    Autograd=torch.library.fallthrough_kernel,
)
def _convert(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: Sequence[int]
) -> Tensor:
    from qsync_fx.backend.cuda.problem.padding import laid_out
    from qsync_fx.backend.cuda.runtime import layout_convert

    _convert_fake(x, dtype, scale, transposed, shape)
    if x.is_cuda and x.numel():
        result = layout_convert.convert(x, scale, dtype, transposed, (shape[0], shape[1]))
        if result is not None:
            return result
    if transposed:
        x = x.t()
    if scale is not None:
        x = x.to(torch.float32) * scale
    return laid_out(x.to(dtype), shape[0], shape[1], "row")


def carry(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `q`, any shape and strides, cast to `dtype`, in which each is exact.

    The forward pass uses this operator so that the quantized tensor is saved for backward, not the
    result of the cast, which a joint-graph partitioner would save if it saw it in both passes.
    """
    if q.dtype == dtype:
        return q
    return _carry(q, dtype)


@define(
    "carry(Tensor q, ScalarType dtype) -> Tensor",
    fake=lambda q, dtype: torch.empty_like(q, dtype=dtype),
)
def _carry(q: Tensor, dtype: torch.dtype) -> Tensor:
    return q.to(dtype, copy=True)


def in_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return `x`, or a copy of it, dense in memory with its dimensions in `order`.

    An operator that replaces torch's has the same output strides: a traced graph lacks a
    `contiguous()` that had no effect on the traced strides, and `view` fails on others. `order` is
    from the outermost dimension in memory to the innermost.
    """
    permuted = x.permute(list(order))
    if _has_dense_strides(permuted):
        return x
    back = [list(order).index(dim) for dim in range(x.dim())]
    return _with_unit_strides(permuted.contiguous()).permute(back)


define("in_order(Tensor x, int[] order) -> Tensor", "CompositeImplicitAutograd")(in_order)


def _has_dense_strides(x: Tensor) -> bool:
    """Return whether `x` has a new contiguous tensor's strides, also in dimensions of size 1."""
    expected: Any = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _with_unit_strides(x: Tensor) -> Tensor:
    """Return contiguous `x` with the strides of a new tensor along dimensions of size 1."""
    if _has_dense_strides(x):
        return x
    units = [dim for dim, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    for dim in reversed(units):
        x = x.squeeze(dim)
    for dim in units:
        x = x.unsqueeze(dim)
    return x


def convolution_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the memory format of a 2-D or 3-D convolution's output and gradients in torch."""
    formats = {suggest_memory_format(operand) for operand in (x, weight)}
    return (formats - {torch.contiguous_format} or formats).pop()
