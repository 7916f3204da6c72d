"""Products of INT8 convolutions by the native module: which it computes, and the call.

A convolution is the product of its weight with its windows, which the kernel gathers block by block on the way into its caches; they are
never in memory. So is the weight gradient, with windows turned; the input gradient is a convolution of the output's gradient with the
weight turned around, as long as windows move by one.

Invariant: the result is that of `fallback.conv2d_product`, to the last bit: sums are exact.
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
from qsync_fx.backend.cuda.problem import ConvOperation
from qsync_fx.backend.operators.gradients.live_taps import places
from qsync_fx.backend.operators.multiplying.on_cpu import LONGEST, Epilogue, finished

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
    return b.shape[0] * math.prod(b.shape[2:]) if operation == "dgrad" else a.shape[0] * math.prod(a.shape[2:])


def multiplies(a: Tensor, b: Tensor, stride: Sequence[int], operation: ConvOperation) -> bool:
    """Whether the native module computes a product; sizes that are symbolic become guards."""
    if a.device.type != "cpu" or not a.dtype == b.dtype == torch.int8:
        return False
    return (operation != "dgrad" or list(stride) == [1, 1]) and length(a, b, operation) <= LONGEST


def pays(a: Tensor, b: Tensor, like: Tensor, stride: Sequence[int], operation: ConvOperation) -> bool:
    """Whether it does so faster than oneDNN in BF16 (docs/kernels.md, "On the CPU"): what it gathers is used for many channels.

    Args:
        like: a tensor of the spatial sizes that `conv2d_product` is told.
    """
    lies = a.is_contiguous(memory_format=torch.channels_last) or _laid_out_later.get()
    if not (multiplies(a, b, stride, operation) and lies):
        return False
    channels = (a.shape[1], b.shape[1]) if operation == "wgrad" else b.shape[:2]
    return too_small((*channels, *(b if operation == "dgrad" else like).shape[2:]), stride) is None


def too_small(weight: Sequence[int], stride: Sequence[int]) -> str | None:
    """Returns why oneDNN in BF16 is as fast as a product of a convolution whose weight has this shape; None where it is not."""
    outputs, inputs, *size = weight
    if min(outputs, inputs) < CHANNELS:
        return f"{min(outputs, inputs)} channels are too few for int8 to pay, from {CHANNELS} on it does"
    if math.prod(size) == 1 and list(stride) != [1, 1]:
        return "a kernel of one value that moves by more leaves too little to compute for int8 to pay"
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
    how: dict[str, Any] = {"kernel": tuple(size), "stride": tuple(stride), "padding": tuple(padding)}
    how |= {"dilation": tuple(dilation), "out": tuple(a.shape[2:])}
    epilogue = Epilogue(a_scale, b_scale, bias, out_dtype)
    if operation == "wgrad":
        # Rows of the result are taps, its columns the channels of the output, which a weight has first.
        found = _multiplied(b, _pixels(a), epilogue, how, taps=True)
        return _turned(found, 1, *found.shape).view(a.shape[1], *size, b.shape[1]).permute(0, 3, 1, 2)
    b = _channels_last(b)
    if operation == "fprop":
        windows = zip(a.shape[2:], size, stride, padding, dilation, strict=True)
        how["out"] = tuple(places(*window) for window in windows)
        taps = b.permute(2, 3, 1, 0).reshape(-1, b.shape[0])
    else:
        how |= {"kernel": tuple(b.shape[2:]), "out": tuple(size)}
        turned = zip(b.shape[2:], padding, dilation, strict=True)
        how["padding"] = tuple(d * (k - 1) - p for k, p, d in turned)
        taps = b.flip(2, 3).permute(2, 3, 0, 1).reshape(-1, b.shape[1])
    found = _multiplied(a, taps, epilogue, how, taps=False)
    return found.view(a.shape[0], *how["out"], taps.shape[1]).permute(0, 3, 1, 2)


def _channels_last(weight: Tensor) -> Tensor:
    """Returns a weight with its channels last in memory, as the rows of windows lie."""
    if weight.is_contiguous(memory_format=torch.channels_last) or not weight.is_contiguous():
        return weight.contiguous(memory_format=torch.channels_last)
    (outputs, inputs), size = weight.shape[:2], weight.shape[2:]
    return _turned(weight, outputs, inputs, math.prod(size)).view(outputs, *size, inputs).permute(0, 3, 1, 2)


def _turned(t: Tensor, count: int, rows: int, columns: int) -> Tensor:
    """Returns `count` matrices that lie one behind the other, each turned: torch's copy takes three times as long."""
    result = torch.empty((count, columns, rows), dtype=t.dtype, device="cpu")
    _C.turn(t.data_ptr(), result.data_ptr(), count, rows, columns, t.dtype.itemsize, torch.get_num_threads())
    return result


def _pixels(t: Tensor) -> Tensor:
    """Returns images as a matrix with a row for each pixel."""
    return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1])


def _multiplied(images: Tensor, b: Tensor, epilogue: Epilogue, how: dict[str, Any], taps: bool) -> Tensor:
    """Returns the product of the windows of images, or of their transpose, with a matrix."""
    count, channels = images.shape[:2]
    rows = math.prod(how["kernel"]) * channels if taps else count * math.prod(how["out"])
    last = images.contiguous(memory_format=torch.channels_last)
    last = last if last.stride(1) == 1 else last.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
    size, n = tuple(images.shape[2:]), b.shape[1]

    def multiply(to: int, **rest: Any) -> None:
        given = {**how, **rest, "size": size, "taps": taps, "n": n, "b_strides": b.stride()}
        _C.conv(last.data_ptr(), b.data_ptr(), to, count, channels, **given)

    return finished((rows, n), epilogue, multiply)
