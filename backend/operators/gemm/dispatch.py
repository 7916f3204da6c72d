"""Choice between our kernels and torch for each product of a layer, and the kernel calls.

The choice is made while a graph is traced: the compiler fuses scales and bias around torch's
products, while a kernel is an opaque call with its own epilogue. The graph gets the faster one for
the traced shapes; both are correct for other shapes of symbolic sizes. On CUDA tuning results
decide. On the CPU the native module computes every INT8 matrix product if the processor has an
integer unit: it scales sums as it writes them, torch in another pass (docs/kernels-cpu.md).

A `Dispatcher` is an argument of every operator of a product (`ProductArguments.dispatcher`).
`KernelDispatcher` computes; `RecordingDispatcher` records the problems of a layer.

Invariant: without kernels for the device a product is None, and the layer computes as usual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.problem import ConvOperation, GemmProblem, Problem
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
from qsync_fx.backend.operators.conv_gradients import Geometry
from qsync_fx.backend.operators.gemm import cpu_kernels
from qsync_fx.backend.operators.gemm.gemm import gemm, multiplies
from qsync_fx.backend.operators.gemm.implicit_gemm import conv2d_product
from qsync_fx.devices import native_integer_unit, row_on
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

    @property
    def second(self) -> Tensor:
        """The second operand as it is multiplied; stacks, which no kernel accepts, unchanged."""
        return self.b.t() if self.transposed and self.b.dim() == 2 else self.b

    @property
    def gemm_product(self) -> GemmProduct:
        """The arguments of `qsync::gemm` that compute it."""
        return GemmProduct(
            self.a,
            self.second,
            self.a_scale,
            self.b_scale,
            self.bias,
            _out(self.out_dtype),
            _gridded(self.row),
        )

    def problem(self) -> GemmProblem | None:
        """Return the problem of the product; None if torch computes it on every device."""
        x = self.gemm_product
        return _gemm_problem(x, outline(x.a), outline(x.b, self.b_dtype))

    def by_gemm(self, b: Tensor, transposed: bool = False) -> Tensor:
        """Return the product by `qsync::gemm` with `b` as its second operand."""
        x = self.gemm_product._replace(b=b)
        return gemm(*x, transposed=transposed).to(self.out_dtype)


class Dispatcher(ABC):
    """Choice between a kernel and torch for each product of a layer.

    The public methods hold the rules from operands to problems. The abstract methods answer what
    differs between computing the products of a layer and recording their problems.

    The problems of a layer are recorded while its operator runs, not derived from its operands:
    they depend on the views, roundings and transposed copies that the operators make in the forward
    and backward pass. A function from operands to problems would repeat the operators.
    """

    def matrix_product(self, product: MatrixProduct) -> Tensor | None:
        """Return a matrix product by a kernel, or None if torch computes it."""
        a, b = product.a, product.b
        if not self.covers(a.device):
            if not (cpu_kernels.multiplies(a, b) and native_integer_unit()):
                return None
            return product.by_gemm(b, transposed=product.transposed)
        problem = product.problem()
        if problem is None or not self._computes(problem, a.device):
            return None
        second = product.second
        return product.by_gemm(second if product.b_dtype is None else second.to(product.b_dtype))

    def convolution_product(
        self,
        a: Tensor,
        b: Tensor,
        *,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        bias: Tensor | None,
        like: Tensor,
        geometry: Geometry,
        operation: ConvOperation,
        out_dtype: torch.dtype,
        row: Precision,
        b_dtype: torch.dtype | None = None,
    ) -> Tensor | None:
        """Return a product of a 1-D or 2-D convolution by a kernel, or None if torch computes it.

        Operands are as in `qsync::conv2d_product`; `row` and `b_dtype` as in `MatrixProduct`.

        Args:
            like: a tensor with the spatial sizes that `conv2d_product` receives: the input for
                dgrad, else the weight.
            geometry: arguments of `aten::convolution`.
        """
        stride, padding, dilation, transposed, _, groups = geometry
        if (
            transposed
            or groups != 1
            or a.dim() not in (3, 4)
            or (a_scale is not None and a_scale.dim())
        ):
            return None
        x = ConvProduct(
            a,
            b,
            a_scale,
            b_scale,
            bias,
            size=like.shape[2:],
            stride=stride,
            padding=padding,
            dilation=dilation,
            operation=operation,
            out_dtype=_out(out_dtype),
            tf32=_gridded(row),
        )
        if not self.covers(a.device):
            if not (
                a.dim() == 4
                and native_integer_unit()
                and cpu_kernels.pays(a, b, like, stride, operation)
            ):
                return None
            return conv2d_product(*x).to(out_dtype)
        flat = a.dim() == 3
        if flat:
            # 1-D convolutions are images of height 1.
            if b_scale is not None and b_scale.dim():
                b_scale = b_scale.unsqueeze(2)
            x = x._replace(
                a=a.unsqueeze(2),
                b=b.unsqueeze(2),
                b_scale=b_scale,
                size=[1, *x.size],
                stride=[1, *stride],
                padding=[0, *padding],
                dilation=[1, *dilation],
            )
        first, second = outline(x.a), outline(x.b, b_dtype)
        size = sizes_of(x.size)
        if first is None or second is None or size is None:
            return None
        if not multiplies(first.dtype, second.dtype) or 0 in (*first.shape, *second.shape, *size):
            return None
        if not all(isinstance(n, int) for n in (*x.stride, *x.padding, *x.dilation)):
            return None
        problem = conv_problem(x._replace(size=size), first, second)
        if min(problem.p, problem.q) < 1 or not self._computes(problem, a.device):
            return None
        if b_dtype is not None:
            x = x._replace(b=x.b.to(b_dtype))
        result = conv2d_product(*x).to(out_dtype)
        return result.squeeze(2) if flat else result

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

        The quantizer then writes the transpose too.

        Args:
            gradient: `[M, N]`, not rounded yet.
            xq: the saved activation, `[M, K]`.
        """
        rounded = row_on(gradient.device, row).gradient
        layout = outline(gradient)
        if (
            not self.covers(gradient.device)
            or not rounded.scaled
            or layout is None
            or len(layout.shape) != 2
        ):
            return False
        m, n = layout.shape
        x = GemmProduct(gradient.t(), xq, None, x_scale, None, _out(out_dtype), _gridded(row))
        problem = _gemm_problem(x, Outline(rounded.dtype, (n, m), (m, 1)), outline(xq))
        if problem is None:
            return False
        return self._has_kernel(replace(problem, a_scale="tensor"), gradient.device)

    @abstractmethod
    def covers(self, device: torch.device) -> bool:
        """Return whether products on a device have problems."""

    @abstractmethod
    def _computes(self, problem: Problem, device: torch.device) -> bool:
        """Return whether a kernel computes a product, which is about to be computed."""

    @abstractmethod
    def _has_kernel(self, problem: Problem, device: torch.device) -> bool:
        """Return whether a kernel is selected for a product that may be computed later."""

    @abstractmethod
    def _multiplies_integers(self, problem: Problem, device: torch.device) -> bool:
        """Return whether torch's product of a problem multiplies integers as such."""


class KernelDispatcher(Dispatcher):
    """Dispatcher that computes products by the kernels that are selected for a device."""

    def covers(self, device: torch.device) -> bool:
        return known_of(device).arch is not None

    def _computes(self, problem: Problem, device: torch.device) -> bool:
        result = decision(problem, device)
        failed = (
            None
            if result.config is None
            else kernel_registry.failure(codegen.unit_of(result.config))
        )
        if result.config is not None and failed is None:
            return True
        launch_utils.note(shown(problem), result.reason if failed is None else failed.what)
        return False

    def _has_kernel(self, problem: Problem, device: torch.device) -> bool:
        return decision(problem, device).config is not None

    def _multiplies_integers(self, problem: Problem, device: torch.device) -> bool:
        return decision(problem, device).integers


KERNELS: Final = KernelDispatcher()
"""The dispatcher of every call of an operator by torch."""


@dataclass
class RecordingDispatcher(Dispatcher):
    """Dispatcher that records the problems of a layer on any device, the meta device included.

    torch computes all products.

    Attributes:
        problems: the problems of the products, in the order of their computation.
    """

    problems: list[Problem] = field(default_factory=list)

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


def _gemm_problem(x: GemmProduct, a: Outline | None, b: Outline | None) -> GemmProblem | None:
    """Return the problem of a product; None if torch computes it on every device."""
    if a is None or b is None or len(a.shape) != 2:
        return None
    if not multiplies(a.dtype, b.dtype) or 0 in (*a.shape, *b.shape):
        return None
    result = gemm_problem(x, a, b)
    return None if too_large(result.m, result.n, result.k) else result


def _gridded(row: Precision) -> bool:
    """Return whether operands are on the grid of a format without a dtype, TF32."""
    return not row.scaled and not row.plain


def _out(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in OUTPUTS else torch.float32
