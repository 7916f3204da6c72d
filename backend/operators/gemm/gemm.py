"""`qsync::gemm`: one matrix product with scales and bias in its epilogue.

The operator is opaque: on CUDA it is one kernel, selected by shape at run time, with the epilogue
inside. It has no gradient of its own; a layer's operator calls it for each of its three products.
On the CPU it is the native module for INT8, and otherwise the torch reference of every kernel.

Invariant: for INT8 the native module returns the bits of the reference.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import OUTPUTS, GemmProduct, format_name
from qsync_fx.backend.cuda.runtime import launch
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.registration import define, require
from qsync_fx.errors import PrecisionError


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
        transposed: whether `b` is passed as its transpose, `[N, K]`. A transpose outside would be a
            view that a joint-graph partitioner regards as fused into its reader, so that saving an
            INT8 weight seemed expensive, and half of all layers saved a BF16 copy instead.

    Returns:
        `[M, N]`, contiguous. For K = 0 the sum is 0.

    Raises:
        PrecisionError: unsupported dtypes.
    """
    result: Tensor = torch.ops.qsync.gemm.default(
        a, b, a_scale, b_scale, bias, out_dtype, tf32, transposed
    )
    return result


@functools.cache
def multiplies(a: torch.dtype, b: torch.dtype) -> bool:
    """Return whether products accept these operand types: equal ones, or two 8-bit floats."""
    bytes_of_floats = a.is_floating_point and b.is_floating_point and a.itemsize == b.itemsize == 1
    return format_name(a) is not None and format_name(b) is not None and (a == b or bytes_of_floats)


def check_types(a: Tensor, b: Tensor, out_dtype: torch.dtype, where: str) -> None:
    """Raise `PrecisionError` unless products accept these types of operands and output."""
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


def check_scale(scale: Tensor | None, shape: tuple[object, ...], name: str, where: str) -> None:
    """Raise unless a scale is None, one FP32 number, or FP32 of this shape."""
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


def _check(x: GemmProduct, transposed: bool = False) -> None:
    """Raise if the operator cannot compute a product.

    Every kernel call runs this, so messages are built only if a condition may be false.
    """
    where, a, b, bias = "qsync::gemm", x.a, x.b, x.bias
    check_types(a, b, x.out_dtype, where)
    require(a.dim() == 2 and b.dim() == 2, lambda: f"{where}: operands are matrices")
    rows, length = a.shape
    columns, inner = b.shape if transposed else reversed(b.shape)
    if (fits := length == inner) is not True:
        require(
            fits, lambda: f"{where}: {list(a.shape)} and {[inner, columns]} cannot be multiplied"
        )
    check_scale(x.a_scale, (rows, 1), "a_scale", where)
    check_scale(x.b_scale, (1, columns), "b_scale", where)
    if bias is not None and (fits := bias.dim() == 1 and bias.shape[0] == columns) is not True:
        require(fits, lambda: f"{where}: bias is [{columns}]")


def _fake(*arguments: Any) -> Tensor:
    x, transposed = GemmProduct(*arguments[:7]), arguments[7:] == (True,)
    _check(x, transposed)
    return x.a.new_empty((x.a.shape[0], x.b.shape[0 if transposed else 1]), dtype=x.out_dtype)


def _on_cpu(*arguments: Any) -> Tensor:
    x, transposed = GemmProduct(*arguments[:7]), arguments[7:] == (True,)
    _check(x, transposed)
    if cpu_kernels.multiplies(x.a, x.b):
        return cpu_kernels.gemm(x, transposed)
    return reference_result.gemm(x._replace(b=x.b.t()) if transposed else x)


def _kernel(*arguments: Any) -> Tensor:
    x, transposed = GemmProduct(*arguments[:7]), arguments[7:] == (True,)
    if transposed and x.b.dim() == 2:
        x = x._replace(b=x.b.t())
    return launch.gemm(x, check=_check)


define(
    "gemm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, ScalarType out_dtype, bool tf32, "
    "bool transposed=False) -> Tensor",
    {"CPU": _on_cpu, "CUDA": _kernel},
    _fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
)
