"""Arithmetic and arguments that the operators of a product with a weight share.

A product multiplies only values of its formats. Operands are cast to the format's compute dtype
(`Precision.carrier`), in which each value is exact. FP32 scales are applied to the result, except a
scale that varies along the contracted dimension: it is multiplied into the incoming gradient before
rounding (`round_gradients`), or into the saved operand (`backward_operand`).

`define_product` derives each operator's schema from `ProductArguments`; `compute_product` computes
a call of such an operator with another dispatcher. `qsync::widen` is a cast whose gradient is
rounded stochastically.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from qsync_fx import rounding as stream_layout
from qsync_fx.backend.operators.convert import carry
from qsync_fx.backend.operators.gemm.dispatch import KERNELS, Dispatcher
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.backend.operators.registration import define
from qsync_fx.backend.operators.stochastic_round import round_to
from qsync_fx.devices.format_support import row_on
from qsync_fx.formats import FP32, Precision, precision, precision_of
from qsync_fx.graph.fx_utils import filled
from qsync_fx.passes.lowering_registry import Role

_DOWN: Final = 2.0**-9


def carrier(row: Precision, device: torch.device) -> torch.dtype:
    """Return the compute dtype of products of `row`: sums are FP32, results are rounded to it."""
    return row_on(device, row).carrier.dtype


def incoming(row: Precision, device: torch.device) -> Precision:
    """Return the format to which incoming gradients of operators in `row` are rounded."""
    return row_on(device, row).gradient


def short(row: Precision | None) -> bool:
    """Return whether a plain format has a smaller range than FP32."""
    return row is not None and row.plain and row.e_min > FP32.e_min


def carried(
    q: Tensor, scale: Tensor | None, dtype: torch.dtype, again: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return an operand in the compute dtype of a product, and the scale of its values there.

    Five products of 127 by 127 overflow FP16. For FP16 integers are therefore divided by 512, which
    is exact and leaves room for sums of a million products. `again`: the backward pass casts a
    saved operand itself, not by `qsync::carry`.
    """
    result = q.to(dtype) if again else carry(q, dtype)
    if scale is None or q.dtype.is_floating_point or not short(precision_of(dtype)):
        return result, scale
    return result * _DOWN, scale * (1 / _DOWN)


def multiplied_in(row: Precision, other: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype of a product that no integer unit computes.

    On the CPU integers use FP32: the carrier would round sums that are exact for other shapes.
    """
    exact = row.kind == other.kind == "integer" and device.type == "cpu"
    return torch.float32 if exact else carrier(row, device)


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


def backward_operand(
    q: Tensor, scale: Tensor | None, row: Precision, apply: bool, gradients: str = "nearest"
) -> tuple[Tensor, Tensor | None]:
    """Return a saved operand for a product of the backward pass, and the scale left for the result.

    If the gradient format is plain, the operand is multiplied by a scale that is not uniform, or by
    any scale if `apply` (the operand is smaller than the result). The product is rounded to the
    carrier, in BF16 with an error of at most 2**-9, like the result itself; with stochastic
    `gradients` it stays FP32.
    """
    if scale is not None and incoming(row, q.device).plain and (apply or not uniform(scale)):
        product = q.float() * scale
        return (product if gradients == "stochastic" else product.to(carrier(row, q.device))), None
    return q, scale


def round_gradients(
    gradient: Tensor,
    folds: Mapping[Role, Tensor | None],
    seed: Tensor,
    stream: int,
    fmt: str,
    rounding: str,
    keep: Sequence[int] = (),
    gradients: str = "nearest",
) -> dict[Role, tuple[Tensor, Tensor | None]]:
    """Round an incoming gradient to the gradient format of `fmt`, for each product that reads it.

    Args:
        gradient: floating point, any shape.
        folds: scale to multiply into the gradient of each required role, broadcast against
            `gradient`; None if the other operand's scale does not vary along the contracted
            dimension. Roles with None share one rounding.
        seed: the graph's seed.
        stream: the operator's stream; each rounding adds an offset.
        fmt: the operator's format.
        rounding: rounding mode of formats that are not plain.
        keep: dimensions of `gradient` with a scale per index, for scaled gradient formats; one
            scale by default.
        gradients: rounding mode of plain formats, "nearest" or "stochastic".

    Returns:
        For each role of `folds` the rounded gradient and its scale (None for unscaled formats).
    """
    row = incoming(precision(fmt), gradient.device)

    def rounded(value: Tensor, owned: int) -> tuple[Tensor, Tensor | None]:
        if row.scaled:
            return quantize(value, seed, owned, row.name, rounding, keep)
        if short(row) and value.numel():
            factor = _within(value)
            return narrowed(value.float() / factor, row.dtype, seed, owned, gradients), factor
        if row.plain:
            return narrowed(value, row.dtype, seed, owned, gradients), None
        return round_to(value, seed, owned, row.name, rounding), None

    result: dict[Role, tuple[Tensor, Tensor | None]] = {}
    for role, fold in folds.items():
        if fold is not None:
            result[role] = rounded(gradient.float() * fold, stream + stream_layout.BACKWARD[role])
    unfolded = [role for role, fold in folds.items() if fold is None]
    return (
        result | dict.fromkeys(unfolded, rounded(gradient, stream + stream_layout.SHARED))
        if unfolded
        else result
    )


def _within(gradient: Tensor) -> Tensor:
    """Return the power-of-two divisor that leaves room in FP16 for sums of a million values.

    It is 1 for zeros and for gradients with infinities or NaN, which must reach loss scaling.
    """
    largest = gradient.detach().abs().amax().float()
    factor = torch.exp2(torch.ceil(torch.log2(largest)) + 2)
    return torch.where(factor.isfinite() & (largest > 0), factor, torch.ones_like(factor))


def narrowed(
    value: Tensor, dtype: torch.dtype, seed: Tensor, stream: int, gradients: str
) -> Tensor:
    """Return a gradient as `dtype`; `gradients` is the rounding mode below 32 bits."""
    row = precision_of(dtype)
    if (
        gradients == "nearest"
        or row is None
        or value.dtype.itemsize <= dtype.itemsize
        or row.bits >= 32
    ):
        return value.to(dtype)
    return round_to(value, seed, stream, row.name, gradients)


def result(
    value: Tensor, dtype: torch.dtype, seed: Tensor, stream: int, role: Role, gradients: str
) -> Tensor:
    """Return the gradient of the input in `role` as `dtype`; see `narrowed`."""
    return narrowed(
        value, dtype, seed, stream + stream_layout.BACKWARD[role] + stream_layout.RESULT, gradients
    )


def summed(dtype: torch.dtype, gradients: str) -> torch.dtype:
    """Return the dtype in which to compute a gradient: FP32 before stochastic rounding."""
    return torch.float32 if gradients == "stochastic" and dtype.itemsize < 4 else dtype


class ProductArguments(NamedTuple):
    """Arguments shared by the operators of products, in the order of their autograd functions.

    Attributes:
        x, weight: activation and weight, floating point; for autograd only.
        bias: one value per output channel, floating point, or None.
        xq, wq: `x` and `weight` in the format, same shapes.
        x_scale, w_scale: FP32; None for unscaled formats.
        seed: the graph's seed, int64, `[1]` or `[]`.
        stream: distinguishes operators of one graph; in [0, 2**29).
        fmt: name of the format.
        rounding: rounding mode of gradients in other than plain formats.
        out_dtype: dtype of the output.
        gradients: rounding mode of gradients in 16-bit types, "nearest" or "stochastic".
        dispatcher: chooses between kernels and torch for each product. It is no argument of the
            operators: their schemas have no type for it.
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


_TENSORS = "Tensor x, Tensor weight, {third}, Tensor xq, Tensor? x_scale, Tensor wq, Tensor? w_scale, Tensor seed, int stream"
_HOW = "str fmt, str rounding, ScalarType out_dtype"
_LEFT_OUT = {"gradients": "nearest"}

_IMPLEMENTATIONS: Final[dict[OpOverload, Callable[..., Tensor]]] = {}
"""Implementation of each operator of `define_product`."""


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
        name: in the namespace `qsync`.
        compute: called with `ProductArguments`, and with the operator's own arguments by name.
        third: schema of the third argument, which the bias is by default.
        owned: schema of the operator's own arguments.
        gradients: whether gradients may be rounded stochastically.
    """
    arguments = ", ".join((_TENSORS.format(third=third), *([owned] if owned else []), _HOW))
    available = ', str gradients="nearest"' if gradients else ""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        return compute_product(operator, args, kwargs, KERNELS)

    define(f"{name}({arguments}{available}) -> Tensor", {"CompositeImplicitAutograd": kernel})
    operator: OpOverload = getattr(torch.ops.qsync, name).default
    _IMPLEMENTATIONS[operator] = compute


def compute_product(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], dispatcher: Dispatcher
) -> Tensor:
    """Compute a call of an operator of `define_product`, its products chosen by `dispatcher`.

    A call by torch has the dispatcher `KERNELS`.
    """
    by_name = filled(operator, args, kwargs)
    shared = {
        name: by_name.pop(name, _LEFT_OUT.get(name))
        for name in ProductArguments._fields
        if name != "dispatcher"
    }
    inputs = ProductArguments(**shared, dispatcher=dispatcher)
    return _IMPLEMENTATIONS[operator](inputs, **by_name)


def without_gradients(
    gradients: tuple[Tensor | None, ...], owned: int = 0
) -> tuple[Tensor | None, ...]:
    """Return `gradients` followed by None for all other arguments, `owned` of them not shared."""
    return gradients + (None,) * (len(ProductArguments._fields) + owned - len(gradients))


def widen(x: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Return `x` as `dtype`; round its gradient stochastically back to the dtype of `x`.

    The rounding is unbiased. The operator is composite, so a compiler fuses the cast.

    Args:
        x: floating point, any shape and strides.
        seed: the graph's seed, int64, `[1]` or `[]`.
        stream: distinguishes operators of one graph.
        dtype: a dtype that represents all values of `x` exactly.
    """
    result: Tensor = _Widen.apply(x, seed, stream, dtype)  # type: ignore[no-untyped-call]
    return result


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.how = x.dtype, stream
        return x.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (seed,), (dtype, stream) = ctx.saved_tensors, ctx.how
        return narrowed(gradient, dtype, seed, stream, "stochastic"), None, None, None


define(
    "widen(Tensor x, Tensor seed, int stream, ScalarType dtype) -> Tensor",
    {"CompositeImplicitAutograd": widen},
)
