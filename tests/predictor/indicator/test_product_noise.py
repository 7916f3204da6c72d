"""Variance of products of rounded factors, compared with Monte Carlo, for all kinds of product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support.indicators import (
    gradient_products,
    input_gradient_noise,
    weight_gradient_noise,
)
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.indicator.rounding_variance import noise, product_noise, scale
from tests.support import tiers

INT8, E4M3 = FORMATS["int8"], FORMATS["fp8"]
DRAWS = 400

PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (12, 40), (24, 40)),
    "linear of sequences": (F.linear, (3, 5, 16), (12, 16)),
    "activations": (torch.matmul, (2, 3, 8, 16), (2, 3, 16, 8)),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2, padding=2), (3, 4, 17), (6, 4, 5)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (2, 4, 7, 6), (8, 4, 3, 3)),
    "conv2d in groups": (
        lambda x, w: F.conv2d(x, w, groups=4, dilation=2),
        (2, 8, 9, 9),
        (8, 2, 3, 3),
    ),
    "conv3d": (lambda x, w: F.conv3d(x, w, padding=1), (1, 3, 4, 4, 4), (4, 3, 3, 3, 3)),
    "conv_transpose2d": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        (2, 4, 5, 5),
        (4, 6, 3, 3),
    ),
    "experts": (torch.bmm, (3, 6, 16), (3, 16, 10)),
    "einsum": (lambda x, w: torch.einsum("bi,eio->beo", x, w), (5, 16), (3, 16, 8)),
}


def draws(x: Tensor, fmt: object, generator: torch.Generator) -> Tensor:
    """Round stochastically in FP64: up with a probability equal to the fraction."""
    factor = scale(x, fmt)  # type: ignore[arg-type]
    units = x.double() / factor
    below = units.floor()
    return (
        below + (torch.rand(x.shape, generator=generator, dtype=torch.float64) < units - below)
    ) * factor


def measured(make: Callable[[], Tensor], exact: Tensor) -> float:
    return sum(float((make() - exact).square().sum()) for _ in range(DRAWS)) / DRAWS


FAST = ("linear", "conv2d in groups")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=tiers.ALL) for n in PRODUCTS]
)
def test_all_three_products_of_a_layer_are_within_two_percent_of_monte_carlo(name: str) -> None:
    product, of_x, of_w = PRODUCTS[name]
    generator = torch.Generator().manual_seed(7)
    x, w = torch.randn(of_x, generator=generator), torch.randn(of_w, generator=generator)
    x = torch.relu(x)  # as a quarter of a model's tensors
    y = product(x.double(), w.double())
    g = torch.randn(y.shape, generator=generator)
    vx, vw, vg = (noise(t, INT8) for t in (x, w, g))
    to_x, to_w = gradient_products(product, x, w)
    cases = (
        (product_noise(product, x, w, vx, vw), product, x, w),
        (weight_gradient_noise(product, x, w, g, vx, vg), to_w, g, x),
        (input_gradient_noise(product, x, w, g, vw, vg), to_x, g, w),
    )
    for variance, computed, first, second in cases:
        exact = computed(first.double(), second.double())
        assert variance.shape == exact.shape
        sampled = measured(
            lambda c=computed, a=first, b=second: c(
                draws(a, INT8, generator), draws(b, INT8, generator)
            ),
            exact,
        )  # type: ignore[misc]
        assert sampled / float(variance.sum()) == pytest.approx(1, abs=0.02)


def test_the_backward_products_are_autograds() -> None:
    product, of_x, of_w = PRODUCTS["conv2d in groups"]
    x, w = torch.randn(of_x, dtype=torch.float64), torch.randn(of_w, dtype=torch.float64)
    x.requires_grad_(), w.requires_grad_()
    y = product(x, w)
    g = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (x, w), g)
    to_x, to_w = gradient_products(product, x.detach(), w.detach())
    assert torch.allclose(to_x(g, w.detach()), wanted[0])
    assert torch.allclose(to_w(g, x.detach()), wanted[1])


def test_a_linear_layer_in_closed_form() -> None:
    """N |w|**2 v + D |x|**2 u; QSync, Eq. (4), is too large by the reduction length."""
    from qsync_fx.predictor.indicator import formulas

    rows, width, out = 64, 96, 32
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(rows, width, generator=generator),
        torch.randn(out, width, generator=generator),
    )
    v, u = float(scale(x, INT8)) ** 2 / 6, float(scale(w, INT8)) ** 2 / 6
    closed = rows * float(w.square().sum()) * v + out * float(x.square().sum()) * u
    exact = float(product_noise(F.linear, x, w, noise(x, INT8), noise(w, INT8)).sum())
    assert closed / exact == pytest.approx(1, abs=0.02)
    assert formulas.forward(
        formulas.moments(x, INT8), formulas.moments(w, INT8)
    ) / closed == pytest.approx(width, rel=0.02)


@pytest.mark.parametrize("value", [0.0, 1e-42, 1e30])
def test_products_of_edge_values(value: float) -> None:
    x, w = torch.full((4, 8), value), torch.randn(3, 8)
    variance = product_noise(F.linear, x, w, noise(x, INT8), noise(w, INT8))
    assert (variance >= 0).all() and variance.isfinite().all()
    x[1, 2] = torch.nan
    assert (
        product_noise(F.linear, x, w, noise(x, INT8), noise(w, INT8)).isnan().all()
    )  # the scale of the tensor is NaN
