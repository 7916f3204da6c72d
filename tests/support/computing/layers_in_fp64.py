"""Outputs and gradients of layers, computed in FP64 from rounded operands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_fx.backend.operators.product_utils import round_gradients
from qsync_fx.devices.cpu_features import cpu_multiplies_integers
from qsync_fx.formats import FORMATS
from tests.support.computing.lowered_layers import OUT, STREAM, Layer
from tests.support.computing.products_in_fp64 import SEED, Operand, Product


def assert_right(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Assert that output and gradients equal FP64 results of operands rounded to the format."""
    y = layer(x, weight, bias)
    row, inputs = FORMATS[layer.fmt], [t for t in (x, weight, bias) if t is not None]
    assert y.dtype == (layer.out_dtype or OUT[layer.fmt])
    gradient = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, gradient)
    assert [t.dtype for t in gradients] == [t.dtype for t in inputs]
    a, b = layer.operands(x, weight)
    carrier = torch.promote_types(row.carrier.dtype, y.dtype)
    narrow = None if summed_as_integers(layer, weight) else carrier
    forward, to_x, to_weight, spread = products(layer, x, weight)
    shaped = (
        bias if bias is None or layer.geometry is None else bias.view(-1, *[1] * (weight.dim() - 2))
    )
    Product.of(forward, a.value, b.value, shaped).assert_met(y, narrow)

    carrier = row.carrier.dtype
    plain = row.gradient.plain and layer.geometry is not None
    if plain:
        # In the compute dtype, the weight includes its scale, and so does the activation if its
        # scale varies.
        b = Operand(b.value.float().to(carrier), None)
        a = (
            Operand(a.value.float().to(carrier), None)
            if a.scale is not None and a.scale.dim()
            else a
        )
    # A scale that varies along the summed dimension is folded into the rounded gradient.
    folds: dict[Any, Tensor | None] = {
        "activation": spread(b.scale, "weight") if b.scale is not None and b.scale.dim() else None,
        "weight": spread(a.scale, "activation") if a.scale is not None and a.scale.dim() else None,
    }
    rounded = round_gradients(gradient, folds, SEED, STREAM, layer.fmt, layer.rounding)
    into = {role: Operand(*pair).value for role, pair in rounded.items()}
    for_x = b.value if folds["activation"] is None else b.q.double()
    for_weight = a.value if folds["weight"] is None else a.q.double()
    # Linear layers sum integers exactly on every path.
    narrow = (
        None if row.gradient.kind == row.kind == "integer" and layer.geometry is None else carrier
    )
    Product.of(to_x, into["activation"], for_x).assert_met(gradients[0], narrow)
    Product.of(to_weight, into["weight"], for_weight).assert_met(gradients[1], narrow)
    if bias is not None:
        every = [
            d
            for d in range(y.dim())
            if d != (y.dim() - 1 if layer.geometry is None else y.dim() - weight.dim() + 1)
        ]
        ones = torch.ones((), dtype=torch.float64)
        total = functools.partial(torch.sum, dim=every) if every else torch.clone
        summed, resolution = (into["weight"], carrier) if plain else (gradient.double(), None)
        Product.of(lambda g, factor: total(g * factor), summed, ones).assert_met(
            gradients[2], resolution
        )


def summed_as_integers(layer: Layer, weight: Tensor) -> bool:
    """Return whether the output sums are exact."""
    if FORMATS[layer.fmt].dtype != torch.int8:
        return False
    if layer.geometry is None:
        return True
    scalar_kernel, wide = weight[0].numel() == 1, (layer.out_dtype or OUT[layer.fmt]).itemsize > 2
    return (
        wide
        and cpu_multiplies_integers()
        and not (layer.geometry.transposed or layer.geometry.groups > 1 or scalar_kernel)
    )


def products(layer: Layer, x: Tensor, weight: Tensor) -> tuple[Callable[..., Tensor], ...]:
    """Return the three products of a layer in FP64, and a function that shapes scales."""
    geometry = layer.geometry
    if geometry is None:
        return (
            F.linear,
            lambda g, w: g @ w,
            lambda g, x: torch.einsum("...n,...k->nk", g, x),
            lambda scale, role: scale.reshape(-1) if role == "weight" else scale,
        )
    ndim, arguments = weight.dim(), geometry.arguments

    def batched(t: Tensor) -> Tensor:
        return t if t.dim() == ndim else t[None]

    def forward(a: Tensor, b: Tensor) -> Tensor:
        y = torch.ops.aten.convolution(batched(a), b, None, *arguments)
        return y if a.dim() == ndim else y[0]

    def to_x(g: Tensor, b: Tensor) -> Tensor:
        like = batched(torch.empty_like(x, dtype=torch.float64))
        mask = [True, False, False]
        return torch.ops.aten.convolution_backward(batched(g), like, b, None, *arguments, mask)[
            0
        ].view(x.shape)

    def to_weight(g: Tensor, a: Tensor) -> Tensor:
        like, mask = torch.empty_like(weight, dtype=torch.float64), [False, True, False]
        return torch.ops.aten.convolution_backward(
            batched(g), batched(a), like, None, *arguments, mask
        )[1]

    return (
        forward,
        to_x,
        to_weight,
        lambda scale, role: scale.reshape(-1, *[1] * (ndim - 2)) if role == "weight" else scale,
    )
