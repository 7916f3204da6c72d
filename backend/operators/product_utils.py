"""What the operators made of matrix products share: the carrier, the scales, and the rounding of incoming gradients.

Invariant: a product sees only values of its formats. Operands go to the carrier, a float type in which each of their values is
exact; scales are FP32 and applied to the result. The one exception is a scale that varies along the contracted dimension, which cannot
be applied after the product: it is multiplied into the incoming gradient before the gradient is rounded (`round_gradients`), or into the
other operand where that is then a plain format's (`backward_operand`).

What the operators made of a product with a weight are given: one list of arguments, in which each has arguments of its own.

Invariant: the schema is made of that list, and the arguments of a call are taken by their names. So no operator writes the list again.

`qsync::widen`: a conversion to a wider type, whose gradient is rounded stochastically on its way back to the narrow one.

Why composite: forward it is torch's conversion, which a compiler fuses with what surrounds it.

Invariant: values are those of the conversion. The mean of the gradient over many roundings is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qsync_fx import rounding as stream_layout
from qsync_fx.backend.operators.convert import carry
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.backend.operators.registration import define
from qsync_fx.backend.operators.stochastic_round import round_to
from qsync_fx.devices.format_support import row_on
from qsync_fx.formats import FP32, Precision, precision, precision_of
from qsync_fx.graph.fx_utils import filled
from qsync_fx.passes.lowering_registry import Role

_DOWN: Final = 2.0**-9


def carrier(row: Precision, device: torch.device) -> torch.dtype:
    """Returns the type that products of `row` are computed in. Their results are rounded to it, their sums are FP32."""
    return row_on(device, row).carrier.dtype


def incoming(row: Precision, device: torch.device) -> Precision:
    """Returns the format that incoming gradients of operators in `row` are rounded to."""
    return row_on(device, row).gradient


def short(row: Precision | None) -> bool:
    """Whether a format's range is less than FP32's, which sums and gradients may leave."""
    return row is not None and row.plain and row.e_min > FP32.e_min


def carried(
    q: Tensor, scale: Tensor | None, dtype: torch.dtype, again: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns an operand in the type that a product is computed in, and the scale that its values then have.

    Five products of 127 by 127 are more than FP16 holds. There integers are divided by 512, which is exact, and leaves room for sums of a
    million products. `again`: what was carried in the forward pass is made anew.
    """
    result = q.to(dtype) if again else carry(q, dtype)
    if scale is None or q.dtype.is_floating_point or not short(precision_of(dtype)):
        return result, scale
    return result * _DOWN, scale * (1 / _DOWN)


def multiplied_in(row: Precision, other: Precision, device: torch.device) -> torch.dtype:
    """Returns the type that a product is computed in, and rounded to, where no integer unit takes it.

    On the CPU it is FP32 for integers: the carrier would round where another shape has exact sums.
    """
    exact = row.kind == other.kind == "integer" and device.type == "cpu"
    return torch.float32 if exact else carrier(row, device)


def combined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Returns the scale of a product of two tensors with these scales, None being 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second


def transposed(t: Tensor) -> Tensor:
    """Returns a matrix, or each of a stack of them, with rows for columns."""
    return t.t() if t.dim() == 2 else t.mT


def scaled(
    product: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns `product * scale + bias` as `dtype`, computed in FP32 and rounded once."""
    if scale is not None:
        product = product.float() * scale
    if bias is not None:
        product = product.float() + bias.float()
    return product.to(dtype)


def uniform(scale: Tensor | None) -> bool:
    """Whether one scale serves the whole tensor."""
    return scale is None or scale.dim() == 0


def backward_operand(
    q: Tensor, scale: Tensor | None, row: Precision, apply: bool, gradients: str = "nearest"
) -> tuple[Tensor, Tensor | None]:
    """Returns a saved operand for a product of the backward pass, and the scale that is left for the product's result.

    With an incoming gradient of a plain format, a scale can be applied to the operand, which is rounded to the carrier once more: by
    2**-9 of a value in BF16, no more than the result of a product is. It is where it varies along the contracted dimension, and where
    `apply` says that the operand is smaller than the result. Where gradients are rounded stochastically the operand stays FP32.
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
    """Rounds an incoming gradient to the gradient format of `fmt`, for each product of the backward pass that it goes into.

    Args:
        gradient: floating point, any shape.
        folds: for the gradient of each input that needs one, the scale of the product's other operand where that varies along the
            contracted dimension, broadcast against `gradient`; None where nothing is to be multiplied in. All None share one rounding.
        seed: of the graph.
        stream: of the operator; each rounding here has one of its own.
        fmt: the format of the operator.
        rounding: how to round to formats that are not plain.
        keep: dimensions with a scale per index, of a scaled format; by default there is one scale.
        gradients: how to round to plain formats, "nearest" or "stochastic".

    Returns:
        The rounded gradient and its scale (None for unscaled formats) for each of `folds`.
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
    """Returns the power of two that a gradient is divided by so that it uses the range of FP16, and sums of a million values stay in it.

    Where it holds no finite largest value, or zeros alone, that is 1: infinities and NaN reach loss scaling.
    """
    largest = gradient.detach().abs().amax().float()
    factor = torch.exp2(torch.ceil(torch.log2(largest)) + 2)
    return torch.where(factor.isfinite() & (largest > 0), factor, torch.ones_like(factor))


def narrowed(
    value: Tensor, dtype: torch.dtype, seed: Tensor, stream: int, gradients: str
) -> Tensor:
    """Returns a gradient as `dtype`; `gradients` says how it is rounded where that has fewer than 32 bits."""
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
    """Returns the gradient of the input in `role`, computed in FP32 where `gradients` is "stochastic", as `dtype`; see `narrowed`."""
    return narrowed(
        value, dtype, seed, stream + stream_layout.BACKWARD[role] + stream_layout.RESULT, gradients
    )


def summed(dtype: torch.dtype, gradients: str) -> torch.dtype:
    """Returns the type that a gradient is to be computed in which is given out as `dtype`: stochastic rounding starts from FP32."""
    return torch.float32 if gradients == "stochastic" and dtype.itemsize < 4 else dtype


class ProductArguments(NamedTuple):
    """The arguments that `qsync::linear` and its kin share, in the order in which their autograd functions take them.

    Attributes:
        x: the activation, floating point; for autograd only.
        weight: floating point; for autograd only.
        bias: one value an output channel, floating point, or None.
        xq: `x` in the format, same shape.
        x_scale: FP32; None for unscaled formats.
        wq: `weight` in the format, same shape.
        w_scale: FP32; None for unscaled formats.
        seed: int64, `[1]` or `[]`, of the graph.
        stream: tells operators of one graph apart; at least 0 and below 2**29.
        fmt: name of the format.
        rounding: how gradients are rounded to formats that are not plain.
        out_dtype: the output's type.
        gradients: how they are rounded to types of 16 bits, "nearest" or "stochastic".
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


_TENSORS = "Tensor x, Tensor weight, {third}, Tensor xq, Tensor? x_scale, Tensor wq, Tensor? w_scale, Tensor seed, int stream"
_HOW = "str fmt, str rounding, ScalarType out_dtype"
_LEFT_OUT = {"bias": None, "gradients": "nearest"}


def define_product(
    name: str,
    compute: Callable[..., Tensor],
    *,
    third: str = "Tensor? bias",
    owned: str = "",
    gradients: bool = True,
) -> None:
    """Registers an operator that AOTAutograd traces into.

    Args:
        compute: called with what is `Given`, and with the operator's own arguments by name.
        third: what stands in the place of the bias.
        own: other arguments of its own, as a schema has them.
        gradients: whether it may round gradients stochastically.
    """
    arguments = ", ".join((_TENSORS.format(third=third), *([owned] if owned else []), _HOW))
    available = ', str gradients="nearest"' if gradients else ""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        by_name = filled(getattr(torch.ops.qsync, name).default, args, kwargs)
        inputs = ProductArguments(
            *(by_name.pop(field, _LEFT_OUT.get(field)) for field in ProductArguments._fields)
        )
        return compute(inputs, **by_name)

    define(f"{name}({arguments}{available}) -> Tensor", {"CompositeImplicitAutograd": kernel})


def without_gradients(
    gradients: tuple[Tensor | None, ...], owned: int = 0
) -> tuple[Tensor | None, ...]:
    """Returns what a backward function gives: gradients of the first arguments, and none of the others, `own` of which are its own."""
    return gradients + (None,) * (len(ProductArguments._fields) + owned - len(gradients))


def widen(x: Tensor, seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Returns `x` as `dtype`.

    Args:
        x: floating point, any shape and strides.
        seed: int64, `[1]` or `[]`, of the graph.
        stream: tells operators of one graph apart.
        dtype: a type that holds all values of `x`'s.
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
