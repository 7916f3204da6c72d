"""`qsync::gemm`: one matrix product with scales and bias in its epilogue.

Why opaque: on CUDA it is one kernel, chosen for its shape when it runs; what would be fused around a product of torch's is inside it.

Invariant: not differentiable by itself. The operator of a layer calls it for each of its three products, with operands that are saved as
they are. On the CPU it is plain torch, which says what every kernel computes, and for INT8 the native module, to the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem import fallback
from qsync_fx.backend.cuda.problem.operands import OUTPUTS, format_name
from qsync_fx.backend.cuda.run import launch
from qsync_fx.backend.operators.library import define, require
from qsync_fx.backend.operators.multiplying import on_cpu
from qsync_fx.errors import PrecisionError


def gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype = torch.float32,
    tf32: bool = False,
    turned: bool = False,
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
    found: Tensor = torch.ops.qsync.gemm.default(a, b, a_scale, b_scale, bias, out_dtype, tf32, turned)
    return found


@functools.cache
def multiplies(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether operands of these types have a product: formats that products take, and the same, but for floats of one byte."""
    bytes_of_floats = a.is_floating_point and b.is_floating_point and a.itemsize == b.itemsize == 1
    return format_name(a) is not None and format_name(b) is not None and (a == b or bytes_of_floats)


def check_types(a: Tensor, b: Tensor, out_dtype: torch.dtype, where: str) -> None:
    """Raises `PrecisionError` unless products take operands and output of these types."""
    if not multiplies(a.dtype, b.dtype):
        raise PrecisionError(
            f"{a.dtype} and {b.dtype} cannot be multiplied", where=where, do="convert one operand to the other's type"
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
    require(scale.dim() in (0, len(shape)), lambda: f"{where}: {name} has {scale.dim()} dimensions")
    if scale.dim():
        for have, want in zip(scale.shape, shape, strict=True):
            require(have == want, lambda: f"{where}: {name} has the shape {list(scale.shape)}, not {list(shape)}")


class _Asked(NamedTuple):
    """What the operator is given, in the order of its schema."""

    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    tf32: bool
    turned: bool = False

    @property
    def right(self) -> Tensor:
        """The second matrix, `[K, N]`."""
        return self.b.t() if self.turned else self.b


def _check(x: _Asked) -> None:
    """Raises where the operator cannot compute this."""
    where, a, bias = "qsync::gemm", x.a, x.bias
    check_types(a, x.b, x.out_dtype, where)
    require(a.dim() == 2 and x.b.dim() == 2, lambda: f"{where}: operands are matrices")
    inner, columns = reversed(x.b.shape) if x.turned else x.b.shape
    require(a.shape[1] == inner, lambda: f"{where}: {list(a.shape)} and {[inner, columns]} cannot be multiplied")
    check_scale(x.a_scale, (a.shape[0], 1), "a_scale", where)
    check_scale(x.b_scale, (1, columns), "b_scale", where)
    if bias is not None:
        require(bias.dim() == 1 and bias.shape[0] == columns, lambda: f"{where}: bias is [{columns}]")


def _fake(*given: Any) -> Tensor:
    x = _Asked(*given)
    _check(x)
    return x.a.new_empty((x.a.shape[0], x.right.shape[1]), dtype=x.out_dtype)


def _on_cpu(*given: Any) -> Tensor:
    x = _Asked(*given)
    _check(x)
    how = x.a, x.right, x.a_scale, x.b_scale, x.bias, x.out_dtype
    return on_cpu.gemm(*how) if on_cpu.multiplies(*how[:2]) else fallback.gemm(*how)


def _kernel(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tf32: bool,
    turned: bool = False,
) -> Tensor:
    right = b.t() if turned and b.dim() == 2 else b
    return launch.gemm(a, right, a_scale, b_scale, bias, out_dtype, tf32, check=_check_given)


def _check_given(*given: Any) -> None:
    _check(_Asked(*given))


define(
    "gemm(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, ScalarType out_dtype, bool tf32, "
    "bool turned=False) -> Tensor",
    {"CPU": _on_cpu, "CUDA": _kernel},
    _fake,
    tags=(),  # See `qsync_fx.backend.inductor.tuned`.
)
