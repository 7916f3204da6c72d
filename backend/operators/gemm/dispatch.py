"""Choice between our kernels and torch for each product of a layer, and the kernel calls.

The choice is made while a graph is traced: the compiler fuses scales and bias around torch's
products, while a kernel is an opaque call with its own epilogue. The graph gets the faster one for
the traced shapes; both are correct for other shapes of symbolic sizes. On CUDA tuning results
decide. On the CPU the native module computes every INT8 matrix product if the processor has an
integer unit: it scales sums as it writes them, torch in another pass (docs/kernels.md).

Invariant: without kernels for the device every function returns None, and the layer computes as
usual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.problem import ConvOperation, GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem_from_tensors import (
    OUTPUTS,
    ConvWindow,
    Outline,
    conv_problem,
    gemm_problem,
    outline,
    too_large,
)
from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.cuda.runtime.device_state import decision, known_of
from qsync_fx.backend.cuda.tuning import shown
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.gemm.gemm import gemm, multiplies
from qsync_fx.backend.operators.gemm.implicit_gemm import conv2d_product
from qsync_fx.backend.operators.product_utils import incoming
from qsync_fx.devices import native_integer_unit
from qsync_fx.formats import Precision

_asked: ContextVar[list[Problem] | None] = ContextVar("qsync_asked_problems", default=None)


@contextmanager
def collected() -> Iterator[list[Problem]]:
    """Yield a list that collects the problems of all enclosed products; torch computes them.

    Tensors may be on the meta device.
    """
    result: list[Problem] = []
    token = _asked.set(result)
    try:
        yield result
    finally:
        _asked.reset(token)


def silent(device: torch.device) -> bool:
    """Return whether the device has no CUDA kernels and no problems are being collected."""
    return _asked.get() is None and known_of(device).arch is None


def partner(gradient: Tensor) -> torch.dtype | None:
    """Return the dtype to cast saved operands to; None for one-byte gradients (no cast)."""
    return None if gradient.dtype.itemsize == 1 else gradient.dtype


def product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    row: Precision,
    b_dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> Tensor | None:
    """Return `a @ b * a_scale * b_scale + bias` by a kernel, or None if torch computes it.

    Arguments are as in `qsync::gemm`.

    Args:
        row: the format of the layer; for TF32 the operands are on its grid.
        b_dtype: dtype to which `b` is cast first, if any.
        transposed: whether `b` is passed as its transpose.
    """
    if silent(a.device):
        if not (cpu_kernels.multiplies(a, b) and native_integer_unit()):
            return None
        return gemm(
            a, b, a_scale, b_scale, bias, out_dtype=_out(out_dtype), transposed=transposed
        ).to(out_dtype)
    b = _second(b, transposed)
    problem = _problem(outline(a), outline(b, b_dtype), a_scale, b_scale, bias, out_dtype, row)
    if problem is None or not _by_kernel(problem, a.device):
        return None
    settings = a_scale, b_scale, bias, _out(out_dtype), _gridded(row)
    return gemm(a, b if b_dtype is None else b.to(b_dtype), *settings).to(out_dtype)


def integers_pay(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    row: Precision,
    transposed: bool = False,
) -> bool:
    """Return whether torch's product should multiply integers as such, not in the carrier."""
    if silent(a.device) or _asked.get() is not None:
        return True
    problem = _problem(
        outline(a), outline(_second(b, transposed)), a_scale, b_scale, bias, out_dtype, row
    )
    return problem is None or decision(problem, a.device).integers


def wants_turned(
    gradient: Tensor, xq: Tensor, x_scale: Tensor | None, out_dtype: torch.dtype, row: Precision
) -> bool:
    """Return whether a kernel for the weight gradient reads the rounded gradient by columns.

    The quantizer then writes the transpose too.

    Args:
        gradient: `[M, N]`, not rounded yet.
        xq: the saved activation, `[M, K]`.
    """
    rounded = incoming(row, gradient.device)
    lies = outline(gradient)
    if silent(gradient.device) or not rounded.scaled or lies is None or len(lies.shape) != 2:
        return False
    m, n = lies.shape
    transposed, scale = Outline(rounded.dtype, (n, m), (m, 1)), Outline(torch.float32, (), ())
    problem = _problem(transposed, outline(xq), scale, x_scale, None, out_dtype, row)
    if problem is None or _asked.get() is not None:
        return problem is not None
    return decision(problem, gradient.device).config is not None


def _second(b: Tensor, transposed: bool) -> Tensor:
    """Return the second operand as it is multiplied; stacks, which no kernel accepts, unchanged."""
    return b.t() if transposed and b.dim() == 2 else b


def _problem(
    a: Outline | None,
    b: Outline | None,
    a_scale: Tensor | Outline | None,
    b_scale: Tensor | Outline | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    row: Precision,
) -> GemmProblem | None:
    """Return the problem of a product; None if torch computes it on every device."""
    if (
        a is None
        or b is None
        or len(a.shape) != 2
        or not multiplies(a.dtype, b.dtype)
        or 0 in (*a.shape, *b.shape)
    ):
        return None
    result = gemm_problem(a, b, a_scale, b_scale, bias, _out(out_dtype), _gridded(row))
    return None if too_large(result.m, result.n, result.k) else result


def convolved(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    bias: Tensor | None,
    like: Tensor,
    geometry: tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int],
    operation: ConvOperation,
    out_dtype: torch.dtype,
    row: Precision,
    b_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Return a product of a 1-D or 2-D convolution by a kernel, or None.

    Arguments are as in `product` and `qsync::conv2d_product`.

    Args:
        like: a tensor with the spatial sizes that `conv2d_product` receives: the input for dgrad,
            else the weight.
        geometry: stride, padding, dilation, transposed, output_padding, groups of
            `aten::convolution`.
    """
    stride, padding, dilation, transposed, _, groups = geometry
    if (
        transposed
        or groups != 1
        or a.dim() not in (3, 4)
        or (a_scale is not None and a_scale.dim())
    ):
        return None
    if silent(a.device):
        if not (
            a.dim() == 4
            and native_integer_unit()
            and cpu_kernels.pays(a, b, like, stride, operation)
        ):
            return None
        on = like.shape[2:], stride, padding, dilation, operation, _out(out_dtype)
        return conv2d_product(a, b, a_scale, b_scale, bias, *on).to(out_dtype)
    flat = a.dim() == 3
    if flat:
        # 1-D convolutions are images of height 1.
        a, b, like = a.unsqueeze(2), b.unsqueeze(2), like.unsqueeze(2)
        stride, padding, dilation = [1, *stride], [0, *padding], [1, *dilation]
        b_scale = b_scale if b_scale is None or b_scale.dim() == 0 else b_scale.unsqueeze(2)
    first, second, sizes = outline(a), outline(b, b_dtype), outline(like)
    if (
        first is None
        or second is None
        or sizes is None
        or not multiplies(first.dtype, second.dtype)
    ):
        return None
    if 0 in (*first.shape, *second.shape, *sizes.shape):
        return None
    numbers = [outline_pair(part) for part in (stride, padding, dilation)]
    if any(pair is None for pair in numbers):
        return None
    window, out, tf32 = ConvWindow(*numbers), _out(out_dtype), _gridded(row)  # type: ignore[arg-type]
    size = sizes.shape[2], sizes.shape[3]
    problem = conv_problem(
        first, second, a_scale, b_scale, bias, size, window, operation, out, tf32
    )
    if min(problem.p, problem.q) < 1 or not _by_kernel(problem, a.device):
        return None
    second_operand = b if b_dtype is None else b.to(b_dtype)
    settings = like.shape[2:], stride, padding, dilation, operation, out, tf32
    result = conv2d_product(a, second_operand, a_scale, b_scale, bias, *settings).to(out_dtype)
    return result.squeeze(2) if flat else result


def outline_pair(values: Sequence[int]) -> tuple[int, int] | None:
    """Return two numbers; None if they are symbolic."""
    first, second = values
    return (first, second) if isinstance(first, int) and isinstance(second, int) else None


def _gridded(row: Precision) -> bool:
    """Return whether operands are on the grid of a format without a dtype, TF32."""
    return not row.scaled and not row.plain


def _out(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in OUTPUTS else torch.float32


def _by_kernel(problem: Problem, device: torch.device) -> bool:
    requested = _asked.get()
    if requested is not None:
        requested.append(problem)
        return False
    result = decision(problem, device)
    failed = (
        None
        if result.config is None
        else kernel_registry.failure(kernel_registry.unit_of(result.config))
    )
    if result.config is not None and failed is None:
        return True
    launch_utils.note(shown(problem), result.reason if failed is None else failed.what)
    return False
