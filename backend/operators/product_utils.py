"""Arithmetic and arguments that the operators of a product with a weight share.

Operands are cast to the format's compute dtype (`Precision.carrier`), in which each value is exact.
FP32 scales are applied to the result. One that varies along the contracted dimension is multiplied
into the incoming gradient before rounding, or into the saved operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qsync_fx import rounding as stream_layout
from qsync_fx.backend.operators.convert import carry
from qsync_fx.backend.operators.gemm.dispatch import KERNELS, Dispatcher
from qsync_fx.backend.operators.once_differentiable import link, place
from qsync_fx.backend.operators.quantize import quantize, round_to
from qsync_fx.backend.operators.registration import define
from qsync_fx.devices.format_support import row_on
from qsync_fx.formats import FP32, Precision, precision, precision_of
from qsync_fx.graph.fx_utils import filled
from qsync_fx.passes.lowering_registry import Role
from qsync_fx.torch_internals import OpOverload

_DOWN: Final = 2.0**-9

Scaled = tuple[Tensor, Tensor | None]
"""A tensor and the FP32 scale of its values; None means 1."""


def carrier(row: Precision, device: torch.device) -> torch.dtype:
    """Return the compute dtype of products of `row`: sums are FP32, results are rounded to it."""
    return row_on(device, row).carrier.dtype


def incoming(row: Precision, device: torch.device) -> Precision:
    """Return the format to which incoming gradients of operators in `row` are rounded."""
    return row_on(device, row).gradient


def short(row: Precision | None) -> bool:
    """Return whether a plain format has a smaller range than FP32."""
    return row is not None and row.plain and row.e_min > FP32.e_min


def carried(q: Tensor, scale: Tensor | None, dtype: torch.dtype, again: bool = False) -> Scaled:
    """Return an operand in the compute dtype of a product, and the scale of its values there.

    Integers are divided by 512 for FP16, which five products of 127 by 127 overflow; that is exact
    and leaves room for a million products. `again`: the backward pass casts a saved operand itself,
    not by `qsync::carry`.
    """
    result = q.to(dtype) if again else carry(q, dtype)
    if scale is None or q.dtype.is_floating_point or not short(precision_of(dtype)):
        return result, scale
    return result * _DOWN, scale * (1 / _DOWN)


def multiplied_in(row: Precision, other: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype of a product that no integer unit computes; FP32 for integers on the CPU."""
    if row.kind == other.kind == "integer" and device.type == "cpu":
        return torch.float32
    return carrier(row, device)


def combined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the scale of a product of two tensors with these scales; None means 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second


def transposed(t: Tensor) -> Tensor:
    """Return the transpose of a matrix, or of each matrix of a stack."""
    return t.t() if t.dim() == 2 else t.mT


def scaled(
    product: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `product * scale + bias` as `dtype`, computed in FP32 and rounded once."""
    if scale is not None:
        product = product.float() * scale
    if bias is not None:
        product = product.float() + bias.float()
    return product.to(dtype)


def uniform(scale: Tensor | None) -> bool:
    """Return whether the scale is a single number."""
    return scale is None or scale.dim() == 0


def split_scale(
    scale: Tensor | None, is_uniform: bool, per_index: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the scale to apply to a product, and the one to fold into the incoming gradient."""
    if is_uniform:
        return scale, None
    return None, per_index


def backward_operand(
    q: Tensor, scale: Tensor | None, row: Precision, apply: bool, gradients: str = "nearest"
) -> Scaled:
    """Return a saved operand for a product of the backward pass, and the scale left for the result.

    If the gradient format is plain, the operand is multiplied by a scale that is not uniform, or by
    any scale if `apply` (the operand is smaller than the result), and rounded to the carrier, like
    the result itself; with stochastic `gradients` it stays FP32.
    """
    if scale is None or not incoming(row, q.device).plain or not (apply or scale.dim()):
        return q, scale
    product = q.float() * scale
    if gradients != "stochastic":
        product = product.to(carrier(row, q.device))
    return product, None


def round_gradients(
    gradient: Tensor,
    folds: Mapping[Role, Tensor | None],
    seed: Tensor,
    stream: int,
    fmt: str,
    rounding: str,
    keep: Sequence[int] = (),
    gradients: str = "nearest",
) -> dict[Role, Scaled]:
    """Round an incoming gradient to the gradient format of `fmt`, for each product that reads it.

    Args:
        gradient: floating point, any shape.
        folds: scale to multiply into the gradient of each required role, broadcast against
            `gradient`: that of the other operand if it varies along the contracted dimension, else
            None. Roles with None share one rounding.
        seed, stream, fmt, rounding, gradients: of the operator, see `ProductArguments`; each
            rounding adds an offset to the stream.
        keep: dimensions of `gradient` with a scale per index, for scaled gradient formats.

    Returns:
        For each role of `folds` the rounded gradient and its scale (None for unscaled formats).
    """
    row = incoming(precision(fmt), gradient.device)

    def rounded(value: Tensor, offset: int) -> Scaled:
        stream_id = stream + offset
        if row.scaled:
            return quantize(value, seed, stream_id, row.name, rounding, keep)
        if not row.plain:
            return round_to(value, seed, stream_id, row.name, rounding), None
        factor = None
        if short(row) and value.numel():
            factor = _within(value)
            value = value.float() / factor
        return narrowed(value, row.dtype, seed, stream_id, gradients), factor

    result = {
        role: rounded(gradient.float() * fold, stream_layout.BACKWARD[role])
        for role, fold in folds.items()
        if fold is not None
    }
    if unfolded := [role for role, fold in folds.items() if fold is None]:
        result |= dict.fromkeys(unfolded, rounded(gradient, stream_layout.SHARED))
    return result


def _within(gradient: Tensor) -> Tensor:
    """Return the power-of-two divisor that leaves room in FP16 for sums of a million values."""
    # It is 1 for zeros, infinities and NaN, which must reach loss scaling.
    largest = gradient.detach().abs().amax().float()
    factor = torch.exp2(torch.ceil(torch.log2(largest)) + 2)
    return torch.where(factor.isfinite() & (largest > 0), factor, torch.ones_like(factor))


def narrowed(
    value: Tensor, dtype: torch.dtype, seed: Tensor, stream: int, gradients: str
) -> Tensor:
    """Return a gradient as `dtype`; `gradients` is the rounding mode below 32 bits."""
    row = precision_of(dtype)
    exact = value.dtype.itemsize <= dtype.itemsize
    if gradients == "nearest" or exact or row is None or row.bits >= 32:
        return value.to(dtype)
    return round_to(value, seed, stream, row.name, gradients)


class ProductArguments(NamedTuple):
    """Arguments shared by the operators of products, in the order of their autograd functions.

    Attributes:
        x, weight: activation and weight, floating point; for autograd only.
        bias: one value per output channel, floating point, or None.
        xq, wq: `x` and `weight` in the format, same shapes.
        x_scale, w_scale: FP32; None for unscaled formats.
        seed: the graph's seed, int64, `[1]` or `[]`.
        stream: distinguishes operators of one graph; in [0, 2**29).
        rounding: rounding mode of gradients in other than plain formats.
        gradients: rounding mode of gradients in 16-bit types, "nearest" or "stochastic".
        dispatcher: chooses between kernels and torch; no argument of the operators' schemas.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    xq: Tensor
    x_scale: Tensor | None
    wq: Tensor
    w_scale: Tensor | None
    seed: Tensor
    stream: int
    fmt: str
    rounding: str
    out_dtype: torch.dtype
    gradients: str
    dispatcher: Dispatcher = KERNELS

    def save(self, ctx: Any, *others: Tensor, both: bool = False) -> Tensor:
        """Save the operands for backward, and return the output that links it to the inputs.

        `ctx.saved_tensors` are xq, x_scale, wq, w_scale, seed, `others` and the link. A frozen
        weight needs no saved activation, a constant input no saved weight, unless `both`.
        """
        need_x, need_weight = ctx.needs_input_grad[:2]
        xq = self.xq if need_weight or both else None
        wq = self.wq if need_x or both else None
        linked = link()
        pairs = xq, self.x_scale, wq, self.w_scale
        ctx.save_for_backward(*pairs, self.seed, *others, linked)
        ctx.dtypes = [None if t is None else t.dtype for t in self[:3]]
        ctx.settings = self.stream, self.fmt, self.rounding, self.gradients
        ctx.fmt, ctx.place, ctx.dispatcher = self.fmt, place(self.stream), self.dispatcher
        return linked


class GradientRounding:
    """How the gradients of a product are rounded, in a backward pass after `save`."""

    def __init__(self, ctx: Any, seed: Tensor) -> None:
        self.stream, self.fmt, self.rounding, self.mode = ctx.settings
        self.seed, self.needed = seed, ctx.needs_input_grad
        self.dtypes = dict(zip((*Role, "bias"), ctx.dtypes, strict=True))

    def incoming(
        self, gradient: Tensor, w_fold: Tensor | None, x_fold: Tensor | None, keep: Sequence[int]
    ) -> dict[Role, Scaled]:
        """Round the incoming gradient for each product that is needed; see `round_gradients`."""
        each = zip(Role, (w_fold, x_fold), self.needed, strict=False)
        folds = {role: fold for role, fold, need in each if need}
        stream, fmt, rounding = self.stream, self.fmt, self.rounding
        return round_gradients(gradient, folds, self.seed, stream, fmt, rounding, keep, self.mode)

    def summed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which to compute results of a dtype: FP32 before such rounding."""
        if self.mode == "stochastic" and dtype.itemsize < 4:
            return torch.float32
        return dtype

    def result(self, value: Tensor, role: Role) -> Tensor:
        """Return the gradient of the input in `role` in its dtype."""
        stream = self.stream + stream_layout.BACKWARD[role] + stream_layout.RESULT
        return narrowed(value, self.dtypes[role], self.seed, stream, self.mode)

    def bias(self, value: Tensor) -> Tensor:
        """Return the gradient of the bias in its dtype."""
        return narrowed(value, self.dtypes["bias"], self.seed, self.stream, self.mode)


_TENSORS = (
    "Tensor x, Tensor weight, {third}, Tensor xq, Tensor? x_scale, Tensor wq, Tensor? w_scale, "
    "Tensor seed, int stream"
)
_HOW = "str fmt, str rounding, ScalarType out_dtype"

_IMPLEMENTATIONS: Final[dict[OpOverload, Callable[..., Tensor]]] = {}


def define_product(
    name: str,
    compute: Callable[..., Tensor],
    *,
    third: str = "Tensor? bias",
    owned: str = "",
    gradients: bool = True,
) -> None:
    """Register an operator that AOTAutograd traces into.

    Args:
        compute: called with `ProductArguments`, and with the operator's own arguments by name.
        third: schema of the third argument, which the bias is by default.
        owned: schema of the operator's own arguments.
        gradients: whether gradients may be rounded stochastically.
    """
    arguments = ", ".join(filter(None, (_TENSORS.format(third=third), owned, _HOW)))
    if gradients:
        arguments += ', str gradients="nearest"'

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        return compute_product(operator, args, kwargs, KERNELS)

    operator: Any = define(f"{name}({arguments}) -> Tensor", "CompositeImplicitAutograd")(kernel)
    _IMPLEMENTATIONS[operator] = compute


def compute_product(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dispatcher: Dispatcher
) -> Tensor:
    """Compute a call of an operator of `define_product`, its products chosen by `dispatcher`."""
    by_name = {"bias": None, "gradients": "nearest"} | filled(operator, args, kwargs)
    by_name["dispatcher"] = dispatcher
    inputs = ProductArguments(*(by_name.pop(name) for name in ProductArguments._fields))
    return _IMPLEMENTATIONS[operator](inputs, **by_name)


def without_gradients(
    gradients: tuple[Tensor | None, ...], owned: int = 0
) -> tuple[Tensor | None, ...]:
    """Return `gradients` followed by None for all other arguments, `owned` of them not shared."""
    return gradients + (None,) * (len(ProductArguments._fields) + owned - len(gradients))


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.settings = x.dtype, stream
        return x.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (seed,), (dtype, stream) = ctx.saved_tensors, ctx.settings
        return narrowed(gradient, dtype, seed, stream, "stochastic"), None, None, None


_WIDEN = "widen(Tensor x, Tensor seed, int stream, ScalarType dtype) -> Tensor"


@define(_WIDEN, "CompositeImplicitAutograd")
def widen(x: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Return `x` as `dtype`, exactly; round its gradient stochastically to the dtype of `x`."""
    return _Widen.apply(x, seed, stream, dtype)  # type: ignore[no-untyped-call, no-any-return]
