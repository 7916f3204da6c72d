"""Products of INT8 matrices by the native module: which it computes for layers, and the call.

Why not torch's unit for integers, which multiplies faster: it gives out sums in INT32, twice to four times what is kept of them, for
another kernel to scale, and it copies what does not lie as it wants. Here scales and bias are applied to sums in registers, and operands
may lie anyhow, so that one kernel serves all three products of a layer.

Invariant: the result is that of `fallback.gemm`, to the last bit, on every path of the native module.

Products of INT8 convolutions by the native module: which it computes, and the call.

A convolution is the product of its weight with its windows, which the kernel gathers block by block on the way into its caches; they are
never in memory. So is the weight gradient, with windows turned; the input gradient is a convolution of the output's gradient with the
weight turned around, as long as windows move by one.

Invariant: the result is that of `fallback.conv2d_product`, to the last bit: sums are exact.
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
from qsync_fx.backend.cuda.problem.problem import ConvOperation
from qsync_fx.backend.numerics.native import empty_on_cpu
from qsync_fx.backend.operators.conv_gradients import places
from qsync_fx.devices.cpu_features import native_integer_unit
from qsync_fx.devices.format_support import default_precision
from qsync_fx.formats import FP32, Precision, encoding

LONGEST: Final = 131_071
"""Up to here INT32 holds every sum over products of two INT8 numbers."""

ENOUGH_WORK: Final = {8: 2**25, 16: 3 * 2**20}
"""Multiplications of a layer's output from which on its three products are faster in a format than in the next wider one, what is
quantized or converted for them counted, by the format's bits. With half as many INT8 took 1.1 to 1.2 times as long as BF16, with twice
as many 0.75 to 0.9 (`benchmarks/kernels/cpu_kernels.py`). With 2**20 BF16 took 1.24 times as long as FP32 (the median of layers; that of
convolutions is 0.97), with 2**21 0.93 (1.10), with 2**22 0.76 (0.76) and with 2**23 0.65 (0.66) (`benchmarks/kernels/bf16_pays.py`). One
core, AVX512-VNNI and AVX512-BF16."""

LARGE_WEIGHT: Final = 2**23
FEW_ROWS: Final = 32
"""Rows below which a layer with more values of a weight than that is as fast in FP32 as in BF16. What is converted, the weight and its
gradient, is as much memory as FP32's gradient alone, and of sizes that the allocator asks the system for anew in each step. Layers of
3072 x 3072 and 4096 x 4096 took 1.0 to 1.6 of FP32's time with 2 to 16 rows, 0.9 and 1.0 with 32 and 0.8 with 64. Memory of smaller weights
mostly stays with the process, and BF16 pays from two rows on: 0.7 to 0.8 (`benchmarks/kernels/bf16_pays.py`)."""

_TYPES: Final[dict[torch.dtype, Any]] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Epilogue(NamedTuple):
    """What becomes of sums, as in `qsync::gemm`."""

    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype


def multiplies(a: Tensor, b: Tensor) -> bool:
    """Whether the native module multiplies two matrices; sizes that are symbolic become guards."""
    return a.is_cpu and a.dtype == b.dtype == torch.int8 and a.dim() == 2 and a.shape[1] <= LONGEST


def without_unit(device: torch.device) -> str | None:
    """Returns why BF16 is as fast for a layer in INT8 of any size; None where the native module has a unit, or BF16 has none.

    oneDNN may still have one: it gives out sums in INT32, for others to scale, and took 0.7 to 1.4 of BF16's time with all that is
    quantized (a perceptron of 768 and 3072 wide, by the path that quantizes), and a quarter of FP32's.
    """
    wider = default_precision(device)
    if native_integer_unit() or wider is FP32:
        return None
    return f"the native module's path has no unit for int8, and by oneDNN's it is about as fast as by the one for {wider}"


def gemm_too_small(m: int, n: int, k: int, fmt: Precision) -> str | None:
    """Returns why a wider format is as fast for a layer of `m` rows, `n` channels and sums of `k` products; None where it is not."""
    if fmt.bits == 16 and m == 1:
        # Converting the weight and its gradient goes over as much memory as the products: 1.7 to 2.5 times FP32's time, at all sizes.
        return f"{m} x {n} x {k} is one row, for which {encoding(fmt)} does not pay"
    if fmt.bits == 16 and m < FEW_ROWS and n * k > LARGE_WEIGHT:
        return f"{m} x {n} x {k} is few rows for a weight that large: converting it takes longer than {encoding(fmt)} saves"
    if m * n * k >= ENOUGH_WORK.get(fmt.bits, 0):
        return None
    return f"{m} x {n} x {k} is too small for {encoding(fmt)} to pay"


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    transposed: bool = False,
) -> Tensor:
    """Compute `qsync::gemm` of matrices that `multiplies` accepts.

    Written out rather than through `finished`: a small product takes a few microseconds, as much as the calls in between would.
    """
    rows, inner = a.shape
    if transposed:
        columns, b_strides = b.shape[0], b.stride()[::-1]
    else:
        columns, b_strides = b.shape[1], b.stride()
    dtype = _TYPES.get(out_dtype)
    result = empty_on_cpu((rows, columns), (columns or 1, 1), out_dtype if dtype else torch.float32)
    # The converted tensors have to live until the call is over.
    a_scale, b_scale, bias = _vector(a_scale), _vector(b_scale), _vector(bias)
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
    """Returns a product with its epilogue.

    Args:
        shape: of the result.
        epilogue: what the native module does to sums, but for types that it does not write.
        multiply: calls the native module with where to write to, and with what each of its products takes of an epilogue.
    """
    native = epilogue.out_dtype in _TYPES
    result = torch.empty(shape, dtype=epilogue.out_dtype if native else torch.float32, device="cpu")
    # They live until the call is over.
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
    """Returns scales or a bias as the native module reads them."""
    if t is None or (t.dtype == torch.float32 and t.is_contiguous()):
        return t
    return t.to(torch.float32).contiguous()


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


CHANNELS: Final = 64
"""Below it oneDNN is faster: it took 0.4 to 0.9 times as long at 16 and 32 channels (one core, AVX512-VNNI)."""


_laid_out_later: ContextVar[bool] = ContextVar("qsync_laid_out_later", default=False)


@contextmanager
def laid_out_later() -> Iterator[None]:
    """While a graph is traced for a compiler that puts channels last by itself: in the graph, they lie as the model's do."""
    token = _laid_out_later.set(True)
    try:
        yield
    finally:
        _laid_out_later.reset(token)


def length(a: Tensor, b: Tensor, operation: ConvOperation) -> int:
    """Returns how many products a sum of `qsync::conv2d_product` has."""
    if operation == "fprop":
        return math.prod(b.shape[1:])
    return (
        b.shape[0] * math.prod(b.shape[2:])
        if operation == "dgrad"
        else a.shape[0] * math.prod(a.shape[2:])
    )


def multiplies_conv(a: Tensor, b: Tensor, stride: Sequence[int], operation: ConvOperation) -> bool:
    """Whether the native module computes a product; sizes that are symbolic become guards."""
    if a.device.type != "cpu" or not a.dtype == b.dtype == torch.int8:
        return False
    return (operation != "dgrad" or list(stride) == [1, 1]) and length(a, b, operation) <= LONGEST


def pays(
    a: Tensor, b: Tensor, like: Tensor, stride: Sequence[int], operation: ConvOperation
) -> bool:
    """Whether it does so faster than oneDNN in BF16 (docs/kernels.md, "On the CPU"): what it gathers is used for many channels.

    Args:
        like: a tensor of the spatial sizes that `conv2d_product` is told.
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
    """Returns why oneDNN in BF16 is as fast as a product of a convolution whose weight has this shape; None where it is not."""
    outputs, inputs, *size = weight
    if min(outputs, inputs) < CHANNELS:
        return f"{min(outputs, inputs)} channels are too few for int8 to pay, from {CHANNELS} on it does"
    if math.prod(size) == 1 and list(stride) != [1, 1]:
        return (
            "a kernel of one value that moves by more leaves too little to compute for int8 to pay"
        )
    return None


def conv2d_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    operation: ConvOperation,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes `qsync::conv2d_product` of operands that `multiplies` takes and that hold values."""
    settings: dict[str, Any] = {
        "kernel": tuple(size),
        "stride": tuple(stride),
        "padding": tuple(padding),
    }
    settings |= {"dilation": tuple(dilation), "out": tuple(a.shape[2:])}
    epilogue = Epilogue(a_scale, b_scale, bias, out_dtype)
    if operation == "wgrad":
        # Rows of the result are taps, its columns the channels of the output, which a weight has first.
        result = _multiplied(b, _pixels(a), epilogue, settings, taps=True)
        return (
            _turned(result, 1, *result.shape)
            .view(a.shape[1], *size, b.shape[1])
            .permute(0, 3, 1, 2)
        )
    b = _channels_last(b)
    if operation == "fprop":
        windows = zip(a.shape[2:], size, stride, padding, dilation, strict=True)
        settings["out"] = tuple(places(*window) for window in windows)
        taps = b.permute(2, 3, 1, 0).reshape(-1, b.shape[0])
    else:
        settings |= {"kernel": tuple(b.shape[2:]), "out": tuple(size)}
        transposed = zip(b.shape[2:], padding, dilation, strict=True)
        settings["padding"] = tuple(d * (k - 1) - p for k, p, d in transposed)
        taps = b.flip(2, 3).permute(2, 3, 0, 1).reshape(-1, b.shape[1])
    result = _multiplied(a, taps, epilogue, settings, taps=False)
    return result.view(a.shape[0], *settings["out"], taps.shape[1]).permute(0, 3, 1, 2)


def _channels_last(weight: Tensor) -> Tensor:
    """Returns a weight with its channels last in memory, as the rows of windows lie."""
    if weight.is_contiguous(memory_format=torch.channels_last) or not weight.is_contiguous():
        return weight.contiguous(memory_format=torch.channels_last)
    (outputs, inputs), size = weight.shape[:2], weight.shape[2:]
    return (
        _turned(weight, outputs, inputs, math.prod(size))
        .view(outputs, *size, inputs)
        .permute(0, 3, 1, 2)
    )


def _turned(t: Tensor, count: int, rows: int, columns: int) -> Tensor:
    """Returns `count` matrices that lie one behind the other, each turned: torch's copy takes three times as long."""
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
    """Returns images as a matrix with a row for each pixel."""
    return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1])


def _multiplied(
    images: Tensor, b: Tensor, epilogue: Epilogue, settings: dict[str, Any], taps: bool
) -> Tensor:
    """Returns the product of the windows of images, or of their transpose, with a matrix."""
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
