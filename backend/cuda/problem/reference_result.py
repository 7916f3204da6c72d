"""Reference products by torch: the fallback on CUDA, and the definition of the operators on CPU.

Sums over k are exact for INT8 (on CUDA, as floats, while they stay below 2**24). Other sums are
FP32, in which products of two values of at most 16 bits, or of TF32, are exact. The epilogue
computes `sum * a_scale * b_scale + bias` in FP32 and rounds once to the output dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem.problem import ConvOperation, ConvProduct, GemmProduct
from qsync_fx.formats import FORMATS
from qsync_fx.torch_internals import _int_mm, _scaled_mm

FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXACT: Final = {torch.int8: torch.float64}
"""Dtypes in which CPU sums are exact; FP32 for all others."""

CONVERTED: Final = dict.fromkeys((torch.int8, *FP8), torch.bfloat16)
"""Dtypes to which CUDA converts operands that it does not multiply."""


def gemm(x: GemmProduct, *, integers: bool = True) -> Tensor:
    """Compute `qsync::gemm` with torch's own products.

    `integers`: CUDA multiplies INT8 operands as integers if cuBLAS can, otherwise exactly in BF16.
    """
    a, b, scales = x.a, x.b, (x.a_scale, x.b_scale)
    bare = scales == (None, None) and x.bias is None
    if bare and a.dtype == b.dtype == x.out_dtype and a.device.type == "cuda" and a.shape[1]:
        return a @ b
    if a.shape[1]:
        total, scales = _sum(a, b, scales, integers)
    else:
        total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    return epilogue(total, *scales, x.bias, x.out_dtype)


def epilogue(
    total: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return `total * a_scale * b_scale + bias`, in FP32, as `out_dtype`; all broadcast."""
    value = total.to(torch.float32)
    for scale in (a_scale, b_scale):
        if scale is not None:
            value = value * scale
    if bias is not None:
        value = value + bias.to(torch.float32)
    return value.to(out_dtype)


_Scales = tuple[Tensor | None, Tensor | None]


def _sum(a: Tensor, b: Tensor, scales: _Scales, integers: bool) -> tuple[Tensor, _Scales]:
    """Return the sum over k, and the scales that are not yet applied to it."""
    if a.device.type != "cuda":
        wide = _EXACT.get(a.dtype, torch.float32)
        return a.to(wide) @ b.to(wide), scales
    if a.dtype == torch.float32:
        return a @ b, scales
    (m, k), n = a.shape, b.shape[1]
    if a.dtype == torch.int8 and integers and takes_integers(m, n, k):
        return integer_product(a, b.t()), scales
    if a.dtype in FP8 and takes_fp8(a, b):
        return _fp8_sum(a, b, scales)
    narrow = CONVERTED.get(a.dtype, a.dtype)
    # The sum is FP32: the operands' dtype would round it before the scales.
    total: Tensor = torch.ops.aten.mm.dtype(a.to(narrow), b.to(narrow), torch.float32)
    return total, scales


def integer_product(a: Tensor, bt: Tensor) -> Tensor:
    """Return `a @ bt.T` of INT8 matrices [M, K] and [N, K] in INT32, by cuBLAS.

    It supports only operands that are contiguous along k (cuBLAS documentation, cublasLtMatmul).
    """
    return _int_mm(a.contiguous(), bt.contiguous().t())


def takes_integers(m: int, n: int, k: int) -> bool:
    """Return whether `torch._int_mm` accepts INT8 matrices with these sizes without overflow."""
    fits = m > 16 and n % 8 == k % 8 == 0 and min(k, n) > 0
    return fits and k * FORMATS["int8"].max ** 2 < 2**31


def takes_fp8(a: Tensor, b: Tensor) -> bool:
    """Return whether cuBLAS multiplies these FP8 matrices."""
    steps = (a.shape[1], b.shape[1], a.stride(0), b.stride(1), a.data_ptr(), b.data_ptr())
    return (
        (a.device.type != "cuda" or torch.cuda.get_device_capability(a.device) >= (8, 9))
        and not a.dtype == b.dtype == torch.float8_e5m2
        and a.stride(1) == b.stride(0) == 1
        and all(step % 16 == 0 for step in steps)
    )


def _fp8_sum(a: Tensor, b: Tensor, scales: _Scales) -> tuple[Tensor, _Scales]:
    item = torch.ones((), dtype=torch.float32, device=a.device)
    # Per-row and per-column scales need other cuBLAS kernels with their own limits, so the epilogue
    # applies them.
    now, later = [item, item], list(scales)
    for index, scale in enumerate(scales):
        if scale is not None and not scale.dim():
            now[index], later[index] = scale, None
    return _scaled_mm(a, b, now[0], now[1], out_dtype=torch.float32), (later[0], later[1])


def conv2d_product(x: ConvProduct) -> Tensor:
    """Compute `qsync::conv2d_product` with torch's own convolutions.

    CUDA convolves in the compute dtype, which rounds the sum; FP32 if fprop has an FP32 output. The
    result is channels-last.
    """
    dtype = _conv_type(x)
    geometry = x.stride, x.padding, x.dilation
    total = convolve(x.a.to(dtype), x.b.to(dtype), x.size, geometry, x.operation)
    # Per-channel scales are already `[1, K, 1, 1]`; the bias is a vector.
    bias = None if x.bias is None else x.bias.reshape(1, -1, 1, 1)
    value = epilogue(total, x.a_scale, x.b_scale, bias, x.out_dtype)
    if value.is_contiguous(memory_format=torch.channels_last) and value.stride(1) == 1:
        return value
    return torch.empty_like(value, memory_format=torch.channels_last).copy_(value)


def _conv_type(x: ConvProduct) -> torch.dtype:
    if x.a.device.type != "cuda":
        return _EXACT.get(x.a.dtype, torch.float32)
    narrow = CONVERTED.get(x.a.dtype, x.a.dtype)
    if x.operation == "fprop":
        return torch.promote_types(narrow, x.out_dtype)
    return narrow


def convolve(
    a: Tensor,
    b: Tensor,
    size: Sequence[int],
    geometry: tuple[Sequence[int], ...],
    operation: ConvOperation,
) -> Tensor:
    """Return the product without epilogue, in the operands' dtype.

    `size` is the image size for dgrad, the filter size for wgrad; `geometry` is stride, padding and
    dilation.
    """
    settings = (*map(list, geometry), False, [0, 0], 1)
    if operation == "fprop":
        result: Tensor = torch.ops.aten.convolution.default(a, b, None, *settings)
        return result
    backward: Any = torch.ops.aten.convolution_backward.default
    like = _image(a, a.shape[operation == "wgrad"], b.shape[1], *size)
    if operation == "dgrad":
        result = backward(a, like, b, None, *settings, [True, False, False])[0]
    else:
        result = backward(a, b, like, None, *settings, [False, True, False])[1]
    return result


def _image(of: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized channels-last tensor, since a layout copy would count in timings."""
    return torch.empty(shape, dtype=of.dtype, device=of.device, memory_format=torch.channels_last)
