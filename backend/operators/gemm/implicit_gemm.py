"""2-D convolution products as implicit matrix products, with or without an epilogue.

`qsync::conv2d_product` is one of the three products of a convolution with scales and bias in its
epilogue; they share all but the contraction. Kernels gather windows from channels-last memory
without unfolding them. On the CPU the native module does so for INT8, with the bits of the torch
reference, which computes the other types.

`qsync::integer_convolution` returns the exact INT32 sums of an INT8 convolution by the CPU's
integer matrix unit. torch's quantized convolutions require prepacked weights; packing them in each
step costs more than the unit gains. Windows are copied in chunks at one byte per value, which costs
less than a cast to float.

Invariant: results are channels-last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import ConvOperation, ConvProduct
from qsync_fx.backend.cuda.runtime import launch
from qsync_fx.backend.operators.conv_gradients import Geometry, places
from qsync_fx.backend.operators.gemm import cpu_kernels, int_mm
from qsync_fx.backend.operators.gemm.gemm import check_scale, check_types
from qsync_fx.backend.operators.registration import define, require
from qsync_fx.errors import OptionError, nearest
from qsync_fx.formats import Precision

_WHERE = "qsync::conv2d_product"


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
    operation: str,
    out_dtype: torch.dtype = torch.float32,
    tf32: bool = False,
) -> Tensor:
    """Compute one product of an ungrouped convolution.

    `d = product(a, b) * a_scale * b_scale + bias`, with sums as in `qsync::gemm`.

    Args:
        a: fprop: x, `[N, C, H, W]`; dgrad, wgrad: the gradient of y, `[N, K, P, Q]`. Dtypes as in
            `qsync::gemm`, any strides; kernels prefer channels-last.
        b: fprop, dgrad: the weight, `[K, C, R, S]`; wgrad: x.
        a_scale: FP32, `[]`, or None.
        b_scale: FP32, `[]`, for fprop also `[1, K, 1, 1]`, or None.
        bias: floating point, `[K]`, for fprop only, or None.
        size: dgrad: `[H, W]`; fprop, wgrad: `[R, S]`.
        stride, padding, dilation: of the convolution, for height and width.
        operation: "fprop" (output), "dgrad" (input gradient) or "wgrad" (weight gradient).
        out_dtype, tf32: as in `qsync::gemm`.

    Returns:
        y, or the gradient of x or of the weight; channels-last.
    """
    settings = (list(size), list(stride), list(padding), list(dilation), operation, out_dtype, tf32)
    result: Tensor = torch.ops.qsync.conv2d_product.default(a, b, a_scale, b_scale, bias, *settings)
    return result


def _shape(x: ConvProduct) -> tuple[int, ...]:
    """Return the shape of the result; raise if the operands' shapes are inconsistent."""
    a, b, size = x.a, x.b, x.size
    if x.operation == "dgrad":
        inputs, weight, outputs = (a.shape[0], b.shape[1], *size), tuple(b.shape), tuple(a.shape)
    elif x.operation == "wgrad":
        inputs, weight, outputs = tuple(b.shape), (a.shape[1], b.shape[1], *size), tuple(a.shape)
    else:
        require(
            a.shape[1] == b.shape[1],
            lambda: f"{_WHERE}: {a.shape[1]} channels, the weight has {b.shape[1]}",
        )
        inputs, weight, outputs = tuple(a.shape), tuple(b.shape), (a.shape[0], b.shape[0])
    windows = zip(inputs[2:], weight[2:], x.stride, x.padding, x.dilation, strict=True)
    spatial = [places(*window) for window in windows]
    if x.operation == "fprop":
        return (*outputs, *spatial)
    require(
        outputs[1] == weight[0],
        lambda: f"{_WHERE}: {outputs[1]} channels, the weight gives {weight[0]}",
    )
    require(inputs[0] == outputs[0], lambda: f"{_WHERE}: batches of {inputs[0]} and {outputs[0]}")
    for have, want in zip(outputs[2:], spatial, strict=True):
        require(
            have == want, lambda: f"{_WHERE}: the gradient is {list(outputs[2:])}, not {spatial}"
        )
    return inputs if x.operation == "dgrad" else weight


def _check(x: ConvProduct) -> tuple[int, ...]:
    """Return the shape of the result; raise if the arguments are invalid."""
    operations = get_args(ConvOperation)
    if x.operation not in operations:
        raise OptionError(
            f"{x.operation!r} is no product of a convolution",
            where=_WHERE,
            do=nearest(x.operation, operations),
        )
    check_types(x.a, x.b, x.out_dtype, _WHERE)
    require(x.a.dim() == 4 and x.b.dim() == 4, lambda: f"{_WHERE}: operands have four dimensions")
    require(
        all(len(part) == 2 for part in (x.size, x.stride, x.padding, x.dilation)),
        lambda: f"{_WHERE}: sizes are for height and width",
    )
    shape = _shape(x)
    fprop, bias = x.operation == "fprop", x.bias
    require(x.a_scale is None or x.a_scale.dim() == 0, lambda: f"{_WHERE}: a_scale is one number")
    require(fprop or bias is None, lambda: f"{_WHERE}: only fprop has a bias")
    require(
        fprop or x.b_scale is None or x.b_scale.dim() == 0,
        lambda: f"{_WHERE}: b_scale is one number",
    )
    check_scale(x.a_scale, (), "a_scale", _WHERE)
    check_scale(x.b_scale, (1, shape[1], 1, 1), "b_scale", _WHERE)
    if bias is not None:
        require(
            bias.dim() == 1 and bias.shape[0] == shape[1], lambda: f"{_WHERE}: bias is [{shape[1]}]"
        )
    return shape


def _implicit_gemm_fake(*arguments: Any) -> Tensor:
    x = ConvProduct(*arguments)
    shape, device = _check(x), x.a.device
    return torch.empty(shape, dtype=x.out_dtype, device=device, memory_format=torch.channels_last)


def _on_cpu(*arguments: Any) -> Tensor:
    x = ConvProduct(*arguments)
    sizes = (*_check(x), *x.a.shape, *x.b.shape)
    if 0 not in sizes and cpu_kernels.multiplies_conv(x.a, x.b, x.stride, x.operation):
        return cpu_kernels.conv2d_product(x)
    return reference_result.conv2d_product(x)


def _kernel(*arguments: Any) -> Tensor:
    # `launch` caches the check for operands of equal types, shapes and strides.
    return launch.conv2d_product(ConvProduct(*arguments), check=_check)


define(
    "conv2d_product(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, SymInt[] size, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, str operation, ScalarType out_dtype, bool tf32) -> Tensor",
    {"CPU": _on_cpu, "CUDA": _kernel},
    _implicit_gemm_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
)


_WINDOWS: Final = 2**20
"""Bytes of windows per chunk, small enough to stay in a cache until they are multiplied."""


def sums(xq: Tensor, wq: Tensor, geometry: Geometry, row: Precision) -> Tensor | None:
    """Return the exact INT32 sums of a convolution; None without an integer unit.

    Args:
        xq: `[N, C, *size]`, int8.
        wq: `[O, C, *kernel]`, int8."""
    stride, padding, dilation, transposed, _, groups = geometry
    inner = math.prod(wq.shape[1:])
    if (
        transposed
        or groups != 1
        or xq.device.type != "cpu"
        or not int_mm.summed_exactly(xq.device, inner, (row, row))
    ):
        return None
    result: Tensor = torch.ops.qsync.integer_convolution.default(xq, wq, stride, padding, dilation)
    return result


def _size(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    windows = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return [places(*window) for window in windows]


def _compute(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    size = _size(x, weight, stride, padding, dilation)
    last = x.movedim(1, -1)
    if any(padding):
        last = F.pad(last, [0, 0, *(p for p in reversed(padding) for _ in range(2))])
    last = last.contiguous()
    steps = last.stride()
    # [N, *size, *kernel, C], a view.
    windows = last.as_strided(
        (x.shape[0], *size, *weight.shape[2:], x.shape[1]),
        (
            steps[0],
            *(step * s for step, s in zip(steps[1:-1], stride, strict=True)),
            *(step * d for step, d in zip(steps[1:-1], dilation, strict=True)),
            1,
        ),
    )
    columns = int_mm.strided(weight.movedim(1, -1).reshape(weight.shape[0], -1))
    result = torch.empty((x.shape[0], *size, weight.shape[0]), dtype=torch.int32)
    for part, into in _parts(windows, result, columns.shape[1]):
        rows = int_mm.strided(part.reshape(-1, columns.shape[1]))
        torch._int_mm(rows, columns.t(), out=into.view(-1, columns.shape[0]))
    return result.movedim(-1, 1)


def _parts(windows: Tensor, result: Tensor, inner: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows and their results in chunks: several samples, or rows of one sample."""
    item = math.prod(result.shape[1:-1]) * inner
    if item <= _WINDOWS:
        yield from _split(windows, result, item)
    else:
        for sample, into in zip(windows, result, strict=True):
            yield from _split(sample, into, item // result.shape[1])


def _split(windows: Tensor, result: Tensor, bytes_each: int) -> Iterator[tuple[Tensor, Tensor]]:
    count = max(1, _WINDOWS // max(1, bytes_each))
    yield from zip(torch.split(windows, count), torch.split(result, count), strict=True)


def _integer_convolution_fake(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    size = _size(x, weight, stride, padding, dilation)
    return x.new_empty((x.shape[0], *size, weight.shape[0]), dtype=torch.int32).movedim(-1, 1)


define(
    "integer_convolution(Tensor x, Tensor weight, SymInt[] stride, SymInt[] padding, SymInt[] dilation) -> Tensor",
    {"CPU": _compute},
    _integer_convolution_fake,
)
