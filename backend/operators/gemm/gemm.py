"""Products by a kernel: `qsync::gemm` and `qsync::conv2d_product`, with scales and bias inside.

The operators are opaque: on CUDA each is one kernel, selected by shape at run time, on the CPU the
native module for INT8, with the bits of the torch reference, which computes the other types. They
have no gradients; a layer's operator calls them for each of its three products.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import (
    OUTPUTS,
    ConvOperation,
    ConvProduct,
    GemmProduct,
    format_name,
)
from qsync_fx.backend.cuda.runtime import launch
from qsync_fx.backend.operators.conv_gradients import places
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.registration import define, require
from qsync_fx.errors import OptionError, PrecisionError, nearest


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
    tf32: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Compute `d[m, n] = sum_k a[m, k] * b[k, n] * a_scale[m] * b_scale[n] + bias[n]`.

    The sum is exact for INT8, FP32 otherwise; scales and bias are FP32, followed by one rounding to
    `out_dtype`.

    Args:
        a: `[M, K]`, INT8, FP8 (E4M3 or E5M2), FP16, BF16 or FP32, any strides.
        b: `[K, N]`, any strides, dtype of `a`; FP8 types may be mixed.
        a_scale: FP32, `[]` or `[M, 1]`, or None.
        b_scale: FP32, `[]` or `[1, N]`, or None.
        bias: floating point, `[N]`, or None.
        out_dtype: FP32, FP16 or BF16.
        tf32: whether FP32 operands are on the TF32 grid, so that TF32 tensor cores may multiply
            them.
        transposed: whether `b` is passed as its transpose, `[N, K]`. For a transpose outside, a
            joint-graph partitioner saves a BF16 copy instead of an INT8 weight.

    Returns:
        `[M, N]`, contiguous. For K = 0 the sum is 0.

    Raises:
        PrecisionError: unsupported dtypes.
    """
    call: Any = torch.ops.qsync.gemm.default
    result: Tensor = call(a, b, a_scale, b_scale, bias, out_dtype, tf32, transposed)
    return result


@functools.cache
def multiplies(a: torch.dtype, b: torch.dtype) -> bool:
    """Return whether products accept these operand types: equal ones, or two 8-bit floats."""
    bytes_of_floats = a.is_floating_point and b.is_floating_point and a.itemsize == b.itemsize == 1
    return format_name(a) is not None and format_name(b) is not None and (a == b or bytes_of_floats)


def _check_types(a: Tensor, b: Tensor, out_dtype: torch.dtype, where: str) -> None:
    if not multiplies(a.dtype, b.dtype):
        raise PrecisionError(
            f"{a.dtype} and {b.dtype} cannot be multiplied",
            where=where,
            do="convert one operand to the other's type",
        )
    if out_dtype not in OUTPUTS:
        raise PrecisionError(
            f"a product cannot have {out_dtype} as its type",
            where=where,
            do=f"ask for one of {', '.join(map(str, OUTPUTS))}",
        )


def _check_scale(scale: Tensor | None, shape: tuple[object, ...], name: str, where: str) -> None:
    if scale is None:
        return
    if scale.dtype != torch.float32:
        raise PrecisionError(f"{name} is {scale.dtype}", where=where, do="give scales as float32")
    if scale.dim():
        require(scale.dim() == len(shape), lambda: f"{where}: {name} has {scale.dim()} dimensions")
        for have, want in zip(scale.shape, shape, strict=True):
            require(
                have == want,
                lambda: f"{where}: {name} has the shape {list(scale.shape)}, not {list(shape)}",
            )


def _check_gemm(x: GemmProduct, transposed: bool = False) -> None:
    # Every kernel call runs this, so messages are built only if a condition may be false.
    where, a, b, bias = "qsync::gemm", x.a, x.b, x.bias
    _check_types(a, b, x.out_dtype, where)
    require(a.dim() == 2 and b.dim() == 2, lambda: f"{where}: operands are matrices")
    rows, length = a.shape
    columns, inner = b.shape if transposed else reversed(b.shape)
    if (fits := length == inner) is not True:
        require(
            fits, lambda: f"{where}: {list(a.shape)} and {[inner, columns]} cannot be multiplied"
        )
    _check_scale(x.a_scale, (rows, 1), "a_scale", where)
    _check_scale(x.b_scale, (1, columns), "b_scale", where)
    if bias is not None and (fits := bias.dim() == 1 and bias.shape[0] == columns) is not True:
        require(fits, lambda: f"{where}: bias is [{columns}]")


def _gemm_fake(*arguments: Any) -> Tensor:
    x, transposed = GemmProduct(*arguments[:7]), arguments[7:] == (True,)
    _check_gemm(x, transposed)
    return x.a.new_empty((x.a.shape[0], x.b.shape[not transposed]), dtype=x.out_dtype)


def _gemm_kernel(*arguments: Any) -> Tensor:
    x, transposed = GemmProduct(*arguments[:7]), arguments[7:] == (True,)
    if transposed and x.b.dim() == 2:
        x = x._replace(b=x.b.t())
    return launch.gemm(x, check=_check_gemm)


@define(
    "gemm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, "
    "ScalarType out_dtype, bool tf32, bool transposed=False) -> Tensor",
    "CPU",
    _gemm_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
    CUDA=_gemm_kernel,
)
def _gemm_on_cpu(*arguments: Any) -> Tensor:
    x, transposed = GemmProduct(*arguments[:7]), arguments[7:] == (True,)
    _check_gemm(x, transposed)
    if cpu_kernels.multiplies(x.a, x.b):
        return cpu_kernels.gemm(x, transposed)
    if transposed:
        x = x._replace(b=x.b.t())
    return reference_result.gemm(x)


_CONV = "qsync::conv2d_product"


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

    `d = product(a, b) * a_scale * b_scale + bias`, with sums as in `qsync::gemm`. Kernels gather
    windows from channels-last memory without unfolding them.

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
    call: Any = torch.ops.qsync.conv2d_product.default
    return call(a, b, a_scale, b_scale, bias, *settings)  # type: ignore[no-any-return]


def _shape(x: ConvProduct) -> tuple[int, ...]:
    """Return the shape of the result; raise if the operands' shapes are inconsistent."""
    a, b = tuple(x.a.shape), tuple(x.b.shape)
    match x.operation:
        case "fprop":
            image, weight = a, b
            require(a[1] == b[1], lambda: f"{_CONV}: {a[1]} channels, the weight has {b[1]}")
        case "dgrad":
            image, weight = (a[0], b[1], *x.size), b
            require(a[1] == b[0], lambda: f"{_CONV}: {a[1]} channels, the weight gives {b[0]}")
        case "wgrad":
            image, weight = b, (a[1], b[1], *x.size)
            require(a[0] == b[0], lambda: f"{_CONV}: batches of {b[0]} and {a[0]}")
    windows = zip(image[2:], weight[2:], x.stride, x.padding, x.dilation, strict=True)
    spatial = [places(*window) for window in windows]
    if x.operation == "fprop":
        return (image[0], weight[0], *spatial)
    for have, want in zip(a[2:], spatial, strict=True):
        require(have == want, lambda: f"{_CONV}: the gradient is {list(a[2:])}, not {spatial}")
    return image if x.operation == "dgrad" else weight


def _check_conv(x: ConvProduct) -> tuple[int, ...]:
    operations = get_args(ConvOperation)
    if x.operation not in operations:
        raise OptionError(
            f"{x.operation!r} is no product of a convolution",
            where=_CONV,
            do=nearest(x.operation, operations),
        )
    _check_types(x.a, x.b, x.out_dtype, _CONV)
    require(x.a.dim() == 4 and x.b.dim() == 4, lambda: f"{_CONV}: operands have four dimensions")
    require(
        all(len(part) == 2 for part in (x.size, x.stride, x.padding, x.dilation)),
        lambda: f"{_CONV}: sizes are for height and width",
    )
    shape = _shape(x)
    fprop, bias = x.operation == "fprop", x.bias
    require(x.a_scale is None or x.a_scale.dim() == 0, lambda: f"{_CONV}: a_scale is one number")
    require(fprop or bias is None, lambda: f"{_CONV}: only fprop has a bias")
    per_tensor = x.b_scale is None or x.b_scale.dim() == 0
    require(fprop or per_tensor, lambda: f"{_CONV}: b_scale is one number")
    _check_scale(x.a_scale, (), "a_scale", _CONV)
    _check_scale(x.b_scale, (1, shape[1], 1, 1), "b_scale", _CONV)
    if bias is not None:
        fits = bias.dim() == 1 and bias.shape[0] == shape[1]
        require(fits, lambda: f"{_CONV}: bias is [{shape[1]}]")
    return shape


def _conv_fake(*arguments: Any) -> Tensor:
    x = ConvProduct(*arguments)
    shape, device = _check_conv(x), x.a.device
    return torch.empty(shape, dtype=x.out_dtype, device=device, memory_format=torch.channels_last)


def _conv_kernel(*arguments: Any) -> Tensor:
    # `launch` caches the check for operands of equal types, shapes and strides.
    return launch.conv2d_product(ConvProduct(*arguments), check=_check_conv)


@define(
    "conv2d_product(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, "
    "SymInt[] size, SymInt[] stride, SymInt[] padding, SymInt[] dilation, str operation, "
    "ScalarType out_dtype, bool tf32) -> Tensor",
    "CPU",
    _conv_fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
    CUDA=_conv_kernel,
)
def _conv_on_cpu(*arguments: Any) -> Tensor:
    x = ConvProduct(*arguments)
    sizes = (*_check_conv(x), *x.a.shape, *x.b.shape)
    if 0 not in sizes and cpu_kernels.multiplies_conv(x):
        return cpu_kernels.conv2d_product(x)
    return reference_result.conv2d_product(x)
