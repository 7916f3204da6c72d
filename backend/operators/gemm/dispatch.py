"""Choice between our kernels and torch for each product of a layer, and the kernel calls.

The choice is made while a graph is traced: the compiler fuses scales and bias around torch's
products, while a kernel is an opaque call with its own epilogue. The graph gets the faster one for
the traced shapes; both are correct for other shapes of symbolic sizes. On CUDA tuning results
decide. On the CPU the native module computes every INT8 matrix product if the processor has an
integer unit: it scales sums as it writes them, torch in another pass (docs/kernels.md).

A `Dispatcher` is an argument of every operator of a product (`ProductArguments.dispatcher`).
`KernelDispatcher` computes; `RecordingDispatcher` records the problems of a layer.

Invariant: without kernels for the device a product is None, and the layer computes as usual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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

    def problem(self) -> GemmProblem | None:
        """Return the problem of the product; None if torch computes it on every device."""
        return _gemm_problem(
            outline(self.a),
            outline(self.second, self.b_dtype),
            a_scale=self.a_scale,
            b_scale=self.b_scale,
            bias=self.bias,
            out_dtype=self.out_dtype,
            row=self.row,
        )

    def by_gemm(self, b: Tensor, transposed: bool = False) -> Tensor:
        """Return the product by `qsync::gemm` with `b` as its second operand."""
        result = gemm(
            self.a,
            b,
            self.a_scale,
            self.b_scale,
            self.bias,
            out_dtype=_out(self.out_dtype),
            tf32=_gridded(self.row),
            transposed=transposed,
        )
        return result.to(self.out_dtype)


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
        out = _out(out_dtype)
        if not self.covers(a.device):
            if not (
                a.dim() == 4
                and native_integer_unit()
                and cpu_kernels.pays(a, b, like, stride, operation)
            ):
                return None
            return conv2d_product(
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
                out_dtype=out,
            ).to(out_dtype)
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
        tf32 = _gridded(row)
        problem = conv_problem(
            first,
            second,
            a_scale,
            b_scale,
            bias,
            size=(sizes.shape[2], sizes.shape[3]),
            window=ConvWindow(*numbers),  # type: ignore[arg-type]
            operation=operation,
            out_dtype=out,
            tf32=tf32,
        )
        if min(problem.p, problem.q) < 1 or not self._computes(problem, a.device):
            return None
        result = conv2d_product(
            a,
            b if b_dtype is None else b.to(b_dtype),
            a_scale,
            b_scale,
            bias,
            size=like.shape[2:],
            stride=stride,
            padding=padding,
            dilation=dilation,
            operation=operation,
            out_dtype=out,
            tf32=tf32,
        ).to(out_dtype)
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
        problem = _gemm_problem(
            Outline(rounded.dtype, (n, m), (m, 1)),
            outline(xq),
            a_scale=Outline(torch.float32, (), ()),
            b_scale=x_scale,
            bias=None,
            out_dtype=out_dtype,
            row=row,
        )
        return problem is not None and self._has_kernel(problem, gradient.device)

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
            else kernel_registry.failure(kernel_registry.unit_of(result.config))
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


def _gemm_problem(
    a: Outline | None,
    b: Outline | None,
    *,
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


def outline_pair(values: Sequence[int]) -> tuple[int, int] | None:
    """Return two numbers; None if they are symbolic."""
    first, second = values
    return (first, second) if isinstance(first, int) and isinstance(second, int) else None


def _gridded(row: Precision) -> bool:
    """Return whether operands are on the grid of a format without a dtype, TF32."""
    return not row.scaled and not row.plain


def _out(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in OUTPUTS else torch.float32
