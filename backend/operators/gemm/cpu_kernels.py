"""INT8 matrix products and convolutions by the native module: eligibility, profitability, calls.

The kernel accepts any strides. A convolution is the product of its weight with windows that the
kernel gathers block by block. The weight gradient uses transposed windows; for stride 1 the input
gradient is a convolution of the output gradient with the flipped weight.
Invariant: the bits of `reference_result` on every ISA variant; sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx import _C
from qsync_fx.backend.cuda.problem.problem import ConvProduct, GemmProduct
from qsync_fx.backend.numerics.native import empty_on_cpu
from qsync_fx.backend.operators.conv_gradients import places
from qsync_fx.devices.cpu_features import native_integer_products
from qsync_fx.devices.format_support import default_precision
from qsync_fx.formats import FP32, Precision, encoding

LONGEST: Final = 131_071
"""Largest K for which INT32 represents every sum of products of two INT8 numbers."""

ENOUGH_WORK: Final = {8: 2**25, 16: 3 * 2**20}
"""Multiplications of a layer's output from which on a narrower format pays, by its bits.

The comparison is with the next wider format, over all three products with quantization or casts
(`benchmarks/kernels/cpu_kernels.py` and `bf16_pays.py`; one core, AVX512-VNNI and AVX512-BF16).
"""

LARGE_WEIGHT: Final = 2**23
FEW_ROWS: Final = 32
"""Rows below which a layer with a weight above `LARGE_WEIGHT` values is as fast in FP32 as in BF16.

The casts use as much memory as FP32's gradient (`benchmarks/kernels/bf16_pays.py`).
"""

_TYPES: Final[dict[torch.dtype, Any]] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def multiplies(a: Tensor, b: Tensor) -> bool:
    """Return whether the native module multiplies two matrices; symbolic sizes become guards."""
    return a.is_cpu and a.dtype == b.dtype == torch.int8 and a.dim() == 2 and a.shape[1] <= LONGEST


def without_unit(device: torch.device) -> str | None:
    """Return why BF16 is as fast as INT8 for a layer of any size on this device.

    None if the native module multiplies INT8 faster than FP32, or if BF16 has no unit.
    oneDNN may still have one, but quantization and the scaling of INT32 sums use up the gain.
    """
    wider = default_precision(device)
    if native_integer_products() or wider is FP32:
        return None
    return (
        "the native module's path has no unit for int8, and by oneDNN's it is about as fast as by "
        f"the one for {wider}"
    )


def gemm_too_small(m: int, n: int, k: int, fmt: Precision) -> str | None:
    """Return why a wider format is as fast for `m` rows, `n` channels and `k` inputs, or None."""
    name = encoding(fmt)
    if fmt.bits == 16 and m == 1:
        # Casts of weight and weight gradient move as much memory as the products.
        return f"{m} x {n} x {k} is one row, for which {name} does not pay"
    if fmt.bits == 16 and m < FEW_ROWS and n * k > LARGE_WEIGHT:
        return (
            f"{m} x {n} x {k} is few rows for a weight that large: converting it takes longer "
            f"than {name} saves"
        )
    if m * n * k < ENOUGH_WORK.get(fmt.bits, 0):
        return f"{m} x {n} x {k} is too small for {name} to pay"
    return None


def gemm(x: GemmProduct, transposed: bool = False) -> Tensor:
    """Compute `qsync::gemm` of matrices that `multiplies` accepts."""
    # Each Python call counts: for small products the kernel takes a few microseconds.
    a, b, out_dtype = x.a, x.b, x.out_dtype
    rows, inner = a.shape
    if transposed:
        columns, b_strides = b.shape[0], b.stride()[::-1]
    else:
        columns, b_strides = b.shape[1], b.stride()
    native = out_dtype in _TYPES
    dtype = out_dtype if native else torch.float32
    result: Tensor = empty_on_cpu((rows, columns), (columns or 1, 1), dtype)
    # The converted tensors must live until the call returns.
    a_scale, b_scale, bias = _vector(x.a_scale), _vector(x.b_scale), _vector(x.bias)
    _C.gemm(
        a.data_ptr(),
        b.data_ptr(),
        result.data_ptr(),
        rows,
        columns,
        inner,
        a.stride(),
        b_strides,
        _TYPES[dtype],
        *a_scale[:2],
        *b_scale[:2],
        bias[0],
        torch.get_num_threads(),
    )
    return result if native else result.to(out_dtype)


def _vector(t: Tensor | None) -> tuple[int, bool, Tensor | None]:
    """Return the address of scales or a bias in FP32, whether it is a vector, and the tensor."""
    if t is None:
        return 0, False, None
    if t.dtype != torch.float32 or not t.is_contiguous():
        t = t.to(torch.float32).contiguous()
    return t.data_ptr(), t.dim() > 0, t


CHANNELS: Final = 64
"""Fewest channels of native INT8 convolutions: oneDNN is faster with 16 and 32 (AVX512-VNNI)."""

_laid_out_later: ContextVar[bool] = ContextVar("qsync_laid_out_later", default=False)


@contextmanager
def laid_out_later() -> Iterator[None]:
    """Assume that the compiler makes images channels-last, although the traced graph does not."""
    token = _laid_out_later.set(True)
    try:
        yield
    finally:
        _laid_out_later.reset(token)


def multiplies_conv(x: ConvProduct) -> bool:
    """Return whether the native module computes a product; symbolic sizes become guards."""
    a, b = x.a, x.b
    if a.device.type != "cpu" or not a.dtype == b.dtype == torch.int8:
        return False
    summed = {
        "fprop": b.shape[1:],
        "dgrad": (b.shape[0], *b.shape[2:]),
        "wgrad": (a.shape[0], *a.shape[2:]),
    }[x.operation]
    unit_stride = list(x.stride) == [1, 1]
    return (x.operation != "dgrad" or unit_stride) and math.prod(summed) <= LONGEST


def pays(x: ConvProduct) -> bool:
    """Return whether the native module is faster than oneDNN in BF16 (docs/kernels-cpu.md)."""
    channels_last = x.a.is_contiguous(memory_format=torch.channels_last) or _laid_out_later.get()
    if not (multiplies_conv(x) and channels_last):
        return False
    weight: Sequence[int] = x.b.shape
    if x.operation == "wgrad":
        weight = (x.a.shape[1], x.b.shape[1], *x.size)
    return conv_too_small(weight, x.stride) is None


def conv_too_small(weight: Sequence[int], stride: Sequence[int]) -> str | None:
    """Return why BF16 in oneDNN is as fast for a convolution with this weight shape, or None."""
    outputs, inputs, *size = weight
    channels = min(outputs, inputs)
    if channels < CHANNELS:
        return f"{channels} channels are too few for int8 to pay, from {CHANNELS} on it does"
    if math.prod(size) == 1 and list(stride) != [1, 1]:
        return "a kernel of one value with a stride leaves too little to compute for int8 to pay"
    return None


def conv2d_product(x: ConvProduct) -> Tensor:
    """Compute `qsync::conv2d_product` of non-empty operands that `multiplies_conv` accepts."""
    a, b, size = x.a, x.b, x.size
    settings: dict[str, Any] = {
        "kernel": tuple(size),
        "stride": tuple(x.stride),
        "padding": tuple(x.padding),
        "dilation": tuple(x.dilation),
        "out": tuple(a.shape[2:]),
    }
    if x.operation == "wgrad":
        # Rows of the result are taps, columns are output channels, which are the first dimension of
        # a weight.
        pixels = a.permute(0, 2, 3, 1).reshape(-1, a.shape[1])
        result = _multiply(x, b, pixels, settings, taps=True)
        by_channel = _transpose(result, 1, *result.shape)
        return by_channel.view(a.shape[1], *size, b.shape[1]).permute(0, 3, 1, 2)
    b = _channels_last(b)
    if x.operation == "fprop":
        windows = zip(a.shape[2:], size, x.stride, x.padding, x.dilation, strict=True)
        settings["out"] = tuple(places(*window) for window in windows)
        taps = b.permute(2, 3, 1, 0).reshape(-1, b.shape[0])
    else:
        settings |= {"kernel": tuple(b.shape[2:]), "out": tuple(size)}
        transposed = zip(b.shape[2:], x.padding, x.dilation, strict=True)
        settings["padding"] = tuple(d * (k - 1) - p for k, p, d in transposed)
        taps = b.flip(2, 3).permute(2, 3, 0, 1).reshape(-1, b.shape[1])
    result = _multiply(x, a, taps, settings, taps=False)
    return result.view(a.shape[0], *settings["out"], taps.shape[1]).permute(0, 3, 1, 2)


def _channels_last(weight: Tensor) -> Tensor:
    """Return a weight in channels-last layout, like the rows of windows."""
    if weight.is_contiguous(memory_format=torch.channels_last) or not weight.is_contiguous():
        return weight.contiguous(memory_format=torch.channels_last)
    (outputs, inputs), size = weight.shape[:2], weight.shape[2:]
    by_pixel = _transpose(weight, outputs, inputs, math.prod(size))
    return by_pixel.view(outputs, *size, inputs).permute(0, 3, 1, 2)


def _transpose(t: Tensor, count: int, rows: int, columns: int) -> Tensor:
    """Return the transposes of `count` consecutive matrices, three times faster than torch."""
    result = torch.empty((count, columns, rows), dtype=t.dtype, device="cpu")
    pointers, threads = (t.data_ptr(), result.data_ptr()), torch.get_num_threads()
    _C.turn(*pointers, count, rows, columns, t.dtype.itemsize, threads)
    return result


def _multiply(
    x: ConvProduct, images: Tensor, b: Tensor, settings: dict[str, Any], taps: bool
) -> Tensor:
    """Return the product of the windows of images, transposed if `taps`, with a matrix."""
    (count, channels), columns = images.shape[:2], b.shape[1]
    rows = count * math.prod(settings["out"])
    if taps:
        rows = math.prod(settings["kernel"]) * channels
    images = images.contiguous(memory_format=torch.channels_last)
    if images.stride(1) != 1:
        by_pixel = images.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
        images = by_pixel.permute(0, 3, 1, 2)
    dtype = x.out_dtype if x.out_dtype in _TYPES else torch.float32
    result = torch.empty((rows, columns), dtype=dtype, device="cpu")
    # The converted tensors must live until the call returns.
    a_scale, b_scale, bias = _vector(x.a_scale), _vector(x.b_scale), _vector(x.bias)
    _C.conv(
        images.data_ptr(),
        b.data_ptr(),
        result.data_ptr(),
        count,
        channels,
        **settings,
        size=tuple(images.shape[2:]),
        taps=taps,
        n=columns,
        b_strides=b.stride(),
        dtype=_TYPES[dtype],
        a_scale=a_scale[0],
        b_scale=b_scale[0],
        b_scale_each=b_scale[1],
        bias=bias[0],
        threads=torch.get_num_threads(),
    )
    return result.to(x.out_dtype)
