"""Choice between our kernels and torch for each product of a layer, and the kernel calls.

A graph gets the faster one for the traced shapes; both are correct for other shapes of symbolic
sizes. On CUDA tuning results decide. On the CPU the native module computes every INT8 matrix
product if the processor has an integer unit (docs/kernels-cpu.md).
Invariant: without kernels for the device a product is None, and the layer computes as usual.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.problem import GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem import (
    OUTPUTS,
    ConvProduct,
    GemmProduct,
    Outline,
    conv_problem,
    gemm_problem,
    outline,
    sizes_of,
    too_large,
)
from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.cuda.runtime.device_state import decision, known_of
from qsync_fx.backend.cuda.tuning import shown
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.gemm.gemm import conv2d_product, gemm, multiplies
from qsync_fx.devices.cpu_features import native_integer_products
from qsync_fx.devices.format_support import row_on
from qsync_fx.formats import Precision


class MatrixProduct(NamedTuple):
    """The product `a @ b * a_scale * b_scale + bias`, with operands as in `qsync::gemm`.

    Attributes:
        row: the format of the layer; for TF32 the operands are on its grid.
        b_dtype: dtype to which a kernel casts `b` first, if any.
        transposed: whether `b` is passed as its transpose.
    """

    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    out_dtype: torch.dtype
    row: Precision
    bias: Tensor | None = None
    b_dtype: torch.dtype | None = None
    transposed: bool = False

    def with_second(self, b: Tensor) -> GemmProduct:
        """Return the arguments of `qsync::gemm` that compute it, with `b` as second operand."""
        scales, dtype = (self.a_scale, self.b_scale), _out(self.out_dtype)
        return GemmProduct(self.a, b, *scales, self.bias, dtype, _gridded(self.row))

    @property
    def straight(self) -> GemmProduct:
        """The same, with `b` not transposed; stacks, which no kernel accepts, unchanged."""
        if self.transposed and self.b.dim() == 2:
            return self.with_second(self.b.t())
        return self.with_second(self.b)

    def problem(self) -> GemmProblem | None:
        """Return the problem of the product; None if torch computes it on every device."""
        x = self.straight
        return _gemm_problem(x, outline(x.a), outline(x.b, self.b_dtype))


class Dispatcher:
    """Choice between a kernel and torch for each product (`ProductArguments.dispatcher`)."""

    def matrix_product(self, product: MatrixProduct) -> Tensor | None:
        """Return a matrix product by a kernel, or None if torch computes it."""
        a, b = product.a, product.b
        if not self.covers(a.device):
            if not (cpu_kernels.multiplies(a, b) and native_integer_products()):
                return None
            x = product.with_second(b)
            return gemm(*x, transposed=product.transposed).to(product.out_dtype)
        problem = product.problem()
        if problem is None or not self._computes(problem, a.device):
            return None
        x = product.straight
        if product.b_dtype is not None:
            x = x._replace(b=x.b.to(product.b_dtype))
        return gemm(*x).to(product.out_dtype)

    def convolution_product(
        self, x: ConvProduct, row: Precision, b_dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Return a product of a 1-D or 2-D convolution by a kernel, or None if torch computes it.

        `x` may have any output dtype; `row` and `b_dtype` are as in `MatrixProduct`.
        """
        device, out_dtype = x.a.device, x.out_dtype
        rank = x.a.dim()
        if rank not in (3, 4) or (x.a_scale is not None and x.a_scale.dim()):
            return None
        x = x._replace(out_dtype=_out(out_dtype), tf32=_gridded(row))
        if not self.covers(device):
            if rank == 4 and native_integer_products() and cpu_kernels.pays(x):
                return conv2d_product(*x).to(out_dtype)
            return None
        if rank == 3:
            x = _as_image(x)
        first, second, size = outline(x.a), outline(x.b, b_dtype), sizes_of(x.size)
        if first is None or second is None or size is None:
            return None
        if not multiplies(first.dtype, second.dtype) or 0 in (*first.shape, *second.shape, *size):
            return None
        if not all(isinstance(n, int) for n in (*x.stride, *x.padding, *x.dilation)):
            return None
        problem = conv_problem(x._replace(size=size), first, second)
        if min(problem.p, problem.q) < 1 or not self._computes(problem, device):
            return None
        if b_dtype is not None:
            x = x._replace(b=x.b.to(b_dtype))
        result = conv2d_product(*x).to(out_dtype)
        return result.squeeze(2) if rank == 3 else result

    def integers_pay(self, product: MatrixProduct) -> bool:
        """Return whether torch's product should multiply integers as such, not in the carrier."""
        if not self.covers(product.a.device):
            return True
        problem = product.problem()
        return problem is None or self._multiplies_integers(problem, product.a.device)

    def reads_transpose(
        self,
        gradient: Tensor,
        xq: Tensor,
        x_scale: Tensor | None,
        out_dtype: torch.dtype,
        row: Precision,
    ) -> bool:
        """Return whether a kernel for the weight gradient reads the rounded gradient by columns.

        The quantizer then writes the transpose too. `gradient` is `[M, N]`, not rounded yet; `xq`,
        the saved activation, is `[M, K]`.
        """
        if not self.covers(gradient.device):
            return False
        rounded, layout = row_on(gradient.device, row).gradient, outline(gradient)
        if not rounded.scaled or layout is None or layout.dim() != 2:
            return False
        m, n = layout.shape
        x = GemmProduct(gradient.t(), xq, None, x_scale, None, _out(out_dtype), _gridded(row))
        problem = _gemm_problem(x, Outline(rounded.dtype, (n, m), (m, 1)), outline(xq))
        if problem is None:
            return False
        return self._has_kernel(replace(problem, a_scale="tensor"), gradient.device)

    def covers(self, device: torch.device) -> bool:
        """Return whether products on a device have problems."""
        return known_of(device).arch is not None

    def _computes(self, problem: Problem, device: torch.device) -> bool:
        """Return whether a kernel computes a product now."""
        selected = decision(problem, device)
        reason = selected.reason
        if selected.config is not None:
            failure = kernel_registry.failure(codegen.unit_of(selected.config))
            if failure is None:
                return True
            reason = failure.what
        launch_utils.note(shown(problem), reason)
        return False

    def _has_kernel(self, problem: Problem, device: torch.device) -> bool:
        """Return whether a kernel is selected for a product that may be computed later."""
        return decision(problem, device).config is not None

    def _multiplies_integers(self, problem: Problem, device: torch.device) -> bool:
        """Return whether torch's product of a problem multiplies integers as such."""
        return decision(problem, device).integers


KERNELS: Final = Dispatcher()
"""The dispatcher of every call of an operator by torch."""


class RecordingDispatcher(Dispatcher):
    """Dispatcher that records the problems of a layer, in order, on any device; torch computes."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def covers(self, device: torch.device) -> bool:
        return True

    def _computes(self, problem: Problem, device: torch.device) -> bool:
        self.problems.append(problem)
        return False

    def _has_kernel(self, problem: Problem, device: torch.device) -> bool:
        return True

    def _multiplies_integers(self, problem: Problem, device: torch.device) -> bool:
        return True


def partner(gradient: Tensor) -> torch.dtype | None:
    """Return the dtype to cast saved operands to; None for one-byte gradients (no cast)."""
    return None if gradient.dtype.itemsize == 1 else gradient.dtype


def _as_image(x: ConvProduct) -> ConvProduct:
    """Return a 1-D convolution as one of images of height 1."""
    if x.b_scale is not None and x.b_scale.dim():
        x = x._replace(b_scale=x.b_scale.unsqueeze(2))
    return x._replace(
        a=x.a.unsqueeze(2),
        b=x.b.unsqueeze(2),
        size=[1, *x.size],
        stride=[1, *x.stride],
        padding=[0, *x.padding],
        dilation=[1, *x.dilation],
    )


def _gemm_problem(x: GemmProduct, a: Outline | None, b: Outline | None) -> GemmProblem | None:
    if a is None or b is None or len(a.shape) != 2:
        return None
    if not multiplies(a.dtype, b.dtype) or 0 in (*a.shape, *b.shape):
        return None
    result = gemm_problem(x, a, b)
    if too_large(result.m, result.n, result.k):
        return None
    return result


def _gridded(row: Precision) -> bool:
    """Return whether operands are on the grid of a format without a dtype, TF32."""
    return not row.scaled and not row.plain


def _out(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in OUTPUTS else torch.float32
