"""INT8 matrix products and convolutions by the native module: eligibility, profitability, calls.

torch's integer unit multiplies faster, but it outputs INT32 sums, two to four times the bytes of
the result, for another kernel to scale, and it copies operands in other layouts. The native kernel
applies scales and bias to sums in registers and accepts any strides, which serves all three
products of a layer.

A convolution is the product of its weight with windows that the kernel gathers into its caches
block by block. The weight gradient uses transposed windows; for stride 1 the input gradient is a
convolution of the output gradient with the flipped weight.

Invariant: the bits of `reference_result` (`gemm`, `conv2d_product`) on every ISA variant; sums are
exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qsync_fx import _C
from qsync_fx.backend.cuda.problem.problem import ConvOperation, ConvProduct, GemmProduct
from qsync_fx.backend.numerics.native import empty_on_cpu
from qsync_fx.backend.operators.conv_gradients import places
from qsync_fx.devices.cpu_features import native_integer_unit
from qsync_fx.devices.format_support import default_precision
from qsync_fx.formats import FP32, Precision, encoding

LONGEST: Final = 131_071
"""Largest K for which INT32 represents every sum of products of two INT8 numbers."""

ENOUGH_WORK: Final = {8: 2**25, 16: 3 * 2**20}
"""Multiplications of a layer's output from which on a narrower format pays, by its bits.

The comparison is with the next wider format, over all three products with quantization or casts.
INT8 took 1.1 to 1.2 times as long as BF16 at half the limit, 0.75 to 0.9 at twice the limit
(`benchmarks/kernels/cpu_kernels.py`). BF16 took 1.24 times as long as FP32 at 2**20 (median of
layers; 0.97 of convolutions), 0.93 (1.10) at 2**21, 0.76 (0.76) at 2**22
(`benchmarks/kernels/bf16_pays.py`). One core, AVX512-VNNI and AVX512-BF16.
"""

LARGE_WEIGHT: Final = 2**23
FEW_ROWS: Final = 32
"""Rows below which a layer with a weight above `LARGE_WEIGHT` values is as fast in FP32 as in BF16.

The casts of weight and weight gradient use as much memory as FP32's gradient alone, in sizes that
the allocator requests from the system in each step. Layers of 3072 x 3072 and 4096 x 4096 took 1.0
to 1.6 of FP32's time with 2 to 16 rows, 0.9 to 1.0 with 32, 0.8 with 64. Smaller weights took 0.7
to 0.8 from two rows on (`benchmarks/kernels/bf16_pays.py`).
"""

_TYPES: Final[dict[torch.dtype, Any]] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Epilogue(NamedTuple):
    """Epilogue of a product, as in `qsync::gemm`."""

    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype


def multiplies(a: Tensor, b: Tensor) -> bool:
    """Return whether the native module multiplies two matrices; symbolic sizes become guards."""
    return a.is_cpu and a.dtype == b.dtype == torch.int8 and a.dim() == 2 and a.shape[1] <= LONGEST


def without_unit(device: torch.device) -> str | None:
    """Return why BF16 is as fast as INT8 for a layer of any size on this device.

    None if the active ISA variant of the native module has an integer unit, or if BF16 has none.
    oneDNN may still have an integer unit, but quantization and the scaling of INT32 sums use up the
    gain: 0.7 to 1.4 of BF16's time.
    """
    wider = default_precision(device)
    if native_integer_unit() or wider is FP32:
        return None
    return f"the native module's path has no unit for int8, and by oneDNN's it is about as fast as by the one for {wider}"


def gemm_too_small(m: int, n: int, k: int, fmt: Precision) -> str | None:
    """Return why a wider format is as fast for `m` rows, `n` channels and `k` inputs, or None."""
    if fmt.bits == 16 and m == 1:
        # Casts of weight and weight gradient move as much memory as the products: 1.7 to 2.5 times
        # as slow as FP32.
        return f"{m} x {n} x {k} is one row, for which {encoding(fmt)} does not pay"
    if fmt.bits == 16 and m < FEW_ROWS and n * k > LARGE_WEIGHT:
        return f"{m} x {n} x {k} is few rows for a weight that large: converting it takes longer than {encoding(fmt)} saves"
    if m * n * k >= ENOUGH_WORK.get(fmt.bits, 0):
        return None
    return f"{m} x {n} x {k} is too small for {encoding(fmt)} to pay"


def gemm(x: GemmProduct, transposed: bool = False) -> Tensor:
    """Compute `qsync::gemm` of matrices that `multiplies` accepts.

    It does not call `finished`: for small products the extra calls take as long as the kernel, a
    few microseconds.
    """
    a, b, out_dtype = x.a, x.b, x.out_dtype
    rows, inner = a.shape
    if transposed:
        columns, b_strides = b.shape[0], b.stride()[::-1]
    else:
        columns, b_strides = b.shape[1], b.stride()
    dtype = _TYPES.get(out_dtype)
    result = empty_on_cpu((rows, columns), (columns or 1, 1), out_dtype if dtype else torch.float32)
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
        dtype or "float32",
        0 if a_scale is None else a_scale.data_ptr(),
        a_scale is not None and a_scale.dim() > 0,
        0 if b_scale is None else b_scale.data_ptr(),
        b_scale is not None and b_scale.dim() > 0,
        0 if bias is None else bias.data_ptr(),
        torch.get_num_threads(),
    )
    return result if dtype else result.to(out_dtype)


def finished(shape: tuple[int, int], epilogue: Epilogue, multiply: Callable[..., None]) -> Tensor:
    """Return a product with its epilogue.

    Args:
        shape: of the result.
        epilogue: applied by the native module, except a final cast to dtypes that it does not
            write.
        multiply: calls the native module with the output address and the arguments of the epilogue.
    """
    native = epilogue.out_dtype in _TYPES
    result = torch.empty(shape, dtype=epilogue.out_dtype if native else torch.float32, device="cpu")
    # These tensors must live until the call returns.
    a_scale, b_scale, bias = map(_vector, (epilogue.a_scale, epilogue.b_scale, epilogue.bias))
    multiply(
        result.data_ptr(),
        dtype=_TYPES[result.dtype],
        a_scale=_address(a_scale),
        b_scale=_address(b_scale),
        b_scale_each=epilogue.b_scale is not None and epilogue.b_scale.dim() > 0,
        bias=_address(bias),
        threads=torch.get_num_threads(),
    )
    return result if native else result.to(epilogue.out_dtype)


def _vector(t: Tensor | None) -> Tensor | None:
    """Return scales or a bias as the native module reads them: FP32, contiguous."""
    if t is None or (t.dtype == torch.float32 and t.is_contiguous()):
        return t
    return t.to(torch.float32).contiguous()


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


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


def length(a: Tensor, b: Tensor, operation: ConvOperation) -> int:
    """Return the number of products per sum of `qsync::conv2d_product`."""
    if operation == "fprop":
        return math.prod(b.shape[1:])
    return (
        b.shape[0] * math.prod(b.shape[2:])
        if operation == "dgrad"
        else a.shape[0] * math.prod(a.shape[2:])
    )


def multiplies_conv(a: Tensor, b: Tensor, stride: Sequence[int], operation: ConvOperation) -> bool:
    """Return whether the native module computes a product; symbolic sizes become guards."""
    if a.device.type != "cpu" or not a.dtype == b.dtype == torch.int8:
        return False
    return (operation != "dgrad" or list(stride) == [1, 1]) and length(a, b, operation) <= LONGEST


def pays(
    a: Tensor, b: Tensor, like: Tensor, stride: Sequence[int], operation: ConvOperation
) -> bool:
    """Return whether the native module is faster than oneDNN in BF16.

    Gathered windows must be used for many channels (docs/kernels-cpu.md).

    Args:
        like: a tensor with the spatial sizes that `conv2d_product` receives.
    """
    lies = a.is_contiguous(memory_format=torch.channels_last) or _laid_out_later.get()
    if not (multiplies_conv(a, b, stride, operation) and lies):
        return False
    channels = (a.shape[1], b.shape[1]) if operation == "wgrad" else b.shape[:2]
    return (
        conv_too_small((*channels, *(b if operation == "dgrad" else like).shape[2:]), stride)
        is None
    )


def conv_too_small(weight: Sequence[int], stride: Sequence[int]) -> str | None:
    """Return why BF16 in oneDNN is as fast for a convolution with this weight shape, or None."""
    outputs, inputs, *size = weight
    if min(outputs, inputs) < CHANNELS:
        return f"{min(outputs, inputs)} channels are too few for int8 to pay, from {CHANNELS} on it does"
    if math.prod(size) == 1 and list(stride) != [1, 1]:
        return (
            "a kernel of one value that moves by more leaves too little to compute for int8 to pay"
        )
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
    epilogue = Epilogue(x.a_scale, x.b_scale, x.bias, x.out_dtype)
    if x.operation == "wgrad":
        # Rows of the result are taps, columns are output channels, which are the first dimension of
        # a weight.
        result = _multiplied(b, _pixels(a), epilogue, settings, taps=True)
        return (
            _turned(result, 1, *result.shape)
            .view(a.shape[1], *size, b.shape[1])
            .permute(0, 3, 1, 2)
        )
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
    result = _multiplied(a, taps, epilogue, settings, taps=False)
    return result.view(a.shape[0], *settings["out"], taps.shape[1]).permute(0, 3, 1, 2)


def _channels_last(weight: Tensor) -> Tensor:
    """Return a weight in channels-last layout, like the rows of windows."""
    if weight.is_contiguous(memory_format=torch.channels_last) or not weight.is_contiguous():
        return weight.contiguous(memory_format=torch.channels_last)
    (outputs, inputs), size = weight.shape[:2], weight.shape[2:]
    return (
        _turned(weight, outputs, inputs, math.prod(size))
        .view(outputs, *size, inputs)
        .permute(0, 3, 1, 2)
    )


def _turned(t: Tensor, count: int, rows: int, columns: int) -> Tensor:
    """Return the transposes of `count` consecutive matrices, three times faster than torch."""
    result = torch.empty((count, columns, rows), dtype=t.dtype, device="cpu")
    _C.turn(
        t.data_ptr(),
        result.data_ptr(),
        count,
        rows,
        columns,
        t.dtype.itemsize,
        torch.get_num_threads(),
    )
    return result


def _pixels(t: Tensor) -> Tensor:
    """Return images as a matrix with one row per pixel."""
    return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1])


def _multiplied(
    images: Tensor, b: Tensor, epilogue: Epilogue, settings: dict[str, Any], taps: bool
) -> Tensor:
    """Return the product of the windows of images, transposed if `taps`, with a matrix."""
    count, channels = images.shape[:2]
    rows = math.prod(settings["kernel"]) * channels if taps else count * math.prod(settings["out"])
    last = images.contiguous(memory_format=torch.channels_last)
    last = (
        last
        if last.stride(1) == 1
        else last.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
    )
    size, n = tuple(images.shape[2:]), b.shape[1]

    def multiply(to: int, **rest: Any) -> None:
        inputs = {**settings, **rest, "size": size, "taps": taps, "n": n, "b_strides": b.stride()}
        _C.conv(last.data_ptr(), b.data_ptr(), to, count, channels, **inputs)

    return finished((rows, n), epilogue, multiply)
