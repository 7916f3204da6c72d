"""What the operators made of a product with a weight are given: one list of arguments, in which each has arguments of its own.

Invariant: the schema is made of that list, and the arguments of a call are taken by their names. So no operator writes the list again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define
from qsync_fx.graph.nodes import filled


class Given(NamedTuple):
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


_TENSORS = (
    "Tensor x, Tensor weight, {third}, Tensor xq, Tensor? x_scale, Tensor wq, Tensor? w_scale, Tensor seed, int stream"
)
_HOW = "str fmt, str rounding, ScalarType out_dtype"
_LEFT_OUT = {"bias": None, "gradients": "nearest"}


def define_product(
    name: str,
    compute: Callable[..., Tensor],
    *,
    third: str = "Tensor? bias",
    own: str = "",
    gradients: bool = True,
) -> None:
    """Registers an operator that AOTAutograd traces into.

    Args:
        compute: called with what is `Given`, and with the operator's own arguments by name.
        third: what stands in the place of the bias.
        own: other arguments of its own, as a schema has them.
        gradients: whether it may round gradients stochastically.
    """
    arguments = ", ".join((_TENSORS.format(third=third), *([own] if own else []), _HOW))
    known = ', str gradients="nearest"' if gradients else ""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        by_name = filled(getattr(torch.ops.qsync, name).default, args, kwargs)
        given = Given(*(by_name.pop(field, _LEFT_OUT.get(field)) for field in Given._fields))
        return compute(given, **by_name)

    define(f"{name}({arguments}{known}) -> Tensor", {"CompositeImplicitAutograd": kernel})


def without_gradients(gradients: tuple[Tensor | None, ...], own: int = 0) -> tuple[Tensor | None, ...]:
    """Returns what a backward function gives: gradients of the first arguments, and none of the others, `own` of which are its own."""
    return gradients + (None,) * (len(Given._fields) + own - len(gradients))
