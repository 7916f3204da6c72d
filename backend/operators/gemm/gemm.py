"""`qsync::gemm`: one matrix product with scales and bias in its epilogue.

Why opaque: on CUDA it is one kernel, chosen for its shape when it runs; what would be fused around a product of torch's is inside it.

Invariant: not differentiable by itself. The operator of a layer calls it for each of its three products, with operands that are saved as
they are. On the CPU it is plain torch, which says what every kernel computes, and for INT8 the native module, to the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem_from_tensors import OUTPUTS, format_name
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
    """Computes `d[m, n] = sum_k a[m, k] * b[k, n] * a_scale[m] * b_scale[n] + bias[n]`.

    The sum is exact for INT8 and FP32 for all else; scales and bias are FP32, and one rounding to `out_dtype` follows.

    Args:
        a: `[M, K]`: INT8, FP8 (E4M3 or E5M2), FP16, BF16 or FP32; any strides.
        b: `[K, N]`, likewise: of the type of `a`, but for FP8, which may be mixed.
        a_scale: FP32, `[]` or `[M, 1]`, or None.
        b_scale: FP32, `[]` or `[1, N]`, or None.
        bias: floating point, `[N]`, or None.
        out_dtype: FP32, FP16 or BF16.
        tf32: whether FP32 operands are on the grid of TF32, whose tensor cores may then multiply them.
        turned: whether `b` is given as its transpose, `[N, K]`. A transpose outside would be a node of its own: a view, in the eyes of a
            partitioner of joint graphs fused into what reads it, so that an INT8 weight seemed dear to keep, and half of all layers, by
            how sizes round, kept a copy in BF16 in its place.

    Returns:
        `[M, N]`, contiguous. With K = 0 the sum is 0.

    Raises:
        PrecisionError: types that no product takes.
    """
    result: Tensor = torch.ops.qsync.gemm.default(
        a, b, a_scale, b_scale, bias, out_dtype, tf32, transposed
    )
    return result


@functools.cache
def multiplies(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether operands of these types have a product: formats that products take, and the same, but for floats of one byte."""
    bytes_of_floats = a.is_floating_point and b.is_floating_point and a.itemsize == b.itemsize == 1
    return format_name(a) is not None and format_name(b) is not None and (a == b or bytes_of_floats)


def check_types(a: Tensor, b: Tensor, out_dtype: torch.dtype, where: str) -> None:
    """Raises `PrecisionError` unless products take operands and output of these types."""
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
    """Raises unless a scale is None, one FP32 number, or FP32 of this shape."""
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


def _check(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tf32: bool,
    transposed: bool = False,
) -> None:
    """Raise where the operator cannot compute a product.

    Every call of a kernel runs this, so texts are made only where a condition is not plainly true.
    """
    where = "qsync::gemm"
    check_types(a, b, out_dtype, where)
    require(a.dim() == 2 and b.dim() == 2, lambda: f"{where}: operands are matrices")
    rows, length = a.shape
    columns, inner = b.shape if transposed else reversed(b.shape)
    if (fits := length == inner) is not True:
        require(
            fits, lambda: f"{where}: {list(a.shape)} and {[inner, columns]} cannot be multiplied"
        )
    if a_scale is not None:
        check_scale(a_scale, (rows, 1), "a_scale", where)
    if b_scale is not None:
        check_scale(b_scale, (1, columns), "b_scale", where)
    if bias is not None and (fits := bias.dim() == 1 and bias.shape[0] == columns) is not True:
        require(fits, lambda: f"{where}: bias is [{columns}]")


def _fake(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    # The schema's order: scales, bias, dtype of the output, tf32, turned.
    *_, out_dtype, _, transposed = others if len(others) == 6 else (*others, False)
    _check(a, b, *others)
    return a.new_empty((a.shape[0], b.shape[0 if transposed else 1]), dtype=out_dtype)


def _on_cpu(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tf32: bool,
    transposed: bool = False,
) -> Tensor:
    _check(a, b, a_scale, b_scale, bias, out_dtype, tf32, transposed)
    if cpu_kernels.multiplies(a, b):
        return cpu_kernels.gemm(a, b, a_scale, b_scale, bias, out_dtype, transposed)
    return reference_result.gemm(a, b.t() if transposed else b, a_scale, b_scale, bias, out_dtype)


def _kernel(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tf32: bool,
    transposed: bool = False,
) -> Tensor:
    right = b.t() if transposed and b.dim() == 2 else b
    return launch.gemm(a, right, a_scale, b_scale, bias, out_dtype, tf32, check=_check)


define(
    "gemm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, ScalarType out_dtype, bool tf32, "
    "bool transposed=False) -> Tensor",
    {"CPU": _on_cpu, "CUDA": _kernel},
    _fake,
    tags=(),  # See `qsync_fx.backend.inductor.inductor_config`.
)
