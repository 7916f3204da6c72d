"""Stochastic rounding is unbiased through operators: the mean over many roundings equals the FP32
result (QSync, section IV-A).

The mean of N results is within a few standard errors of its expectation, so the tests check
`z = (mean - exact) / standard error`. Rounding to a 16-bit compute dtype is to nearest, and its
error need not average out. It is zero if products are exact in that dtype. Otherwise the tests
allow one unit of the product, or one unit of each summand if a scale per channel is multiplied into
a gradient that is then rounded to BF16. Random numbers are the same in each run, since these tests
could otherwise fail by chance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qsync_fx.formats import FORMATS
from tests.support.computing.products_in_fp64 import operand, unit

FORMATS_OF_PRODUCTS = [row.name for row in FORMATS.values() if not row.plain]
ROUNDINGS = 250
LARGEST_Z = 5.0

Run = Callable[..., Tensor]


def greatest_z(draws: Iterable[Tensor], exact: Tensor, allowed: Tensor | float = 0.0) -> float:
    """Return the largest distance of the mean from `exact`, minus `allowed`, in standard errors."""
    values = torch.stack([draw.double() for draw in draws])
    error = (values.mean(0) - exact).abs() - allowed
    # Values that are not rounded stochastically differ from `exact` only by FP32 rounding.
    least = 2.0**-20 * exact.abs().max()
    return (error / (values.std(0) / len(values) ** 0.5).clamp(min=least)).max().item()


def seeds() -> list[Tensor]:
    return [torch.tensor([seed]) for seed in range(ROUNDINGS)]


def linear(fmt: str, rounding: str, channel: bool) -> Run:
    def run(x: Tensor, weight: Tensor, seed: Tensor) -> Tensor:
        a = operand(x, fmt, rounding, [0] if channel else [], 0, seed)
        b = operand(weight, fmt, rounding, [0] if channel else [], 1, seed)
        options = fmt, rounding, torch.float32
        y: Tensor = torch.ops.qsync.linear.default(
            x, weight, None, a.q, a.scale, b.q, b.scale, seed, 2, *options
        )
        return y

    return run


def convolution(fmt: str, rounding: str, channel: bool) -> Run:
    def run(x: Tensor, weight: Tensor, seed: Tensor) -> Tensor:
        a = operand(x, fmt, rounding, [0] if channel else [], 0, seed)
        b = operand(weight, fmt, rounding, [0] if channel else [], 1, seed)
        options = [2], [1], [1], False, [0], 1, [0, 1, 2], fmt, rounding, torch.float32
        y: Tensor = torch.ops.qsync.convolution.default(
            x, weight, None, a.q, a.scale, b.q, b.scale, seed, 2, *options
        )
        return y

    return run


def strided(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x, weight, None, 2, 1)


LAYERS = {
    "linear": (linear, F.linear, (6, 9), (4, 9)),
    "convolution": (convolution, strided, (3, 4, 7), (5, 4, 3)),
}


def results(
    layer: str, fmt: str, rounding: str, channel: bool
) -> list[tuple[list[Tensor], Tensor, Tensor]]:
    """Return for the output and both gradients: the result of each seed, the FP64 result, and the
    error that the compute dtype may add.
    """
    make, plain, shape, weight_shape = LAYERS[layer]
    torch.manual_seed(0)
    x, weight = (
        torch.randn(shape, requires_grad=True),
        torch.randn(weight_shape, requires_grad=True),
    )
    run = make(fmt, rounding, channel)
    # Exact in BF16.
    gradient = torch.randn(plain(x, weight).shape).bfloat16().float()

    exact = all_of(plain, x.double(), weight.double(), gradient.double())
    magnitude = all_of(plain, x.double().abs(), weight.double().abs(), gradient.double().abs())
    row = FORMATS[fmt]
    roundoff = unit(row.carrier.dtype)
    allowed = [
        roundoff * (m if channel and row.gradient.plain else e.abs())
        for m, e in zip(magnitude, exact, strict=True)
    ]
    # The output is FP32 and is computed in FP32.
    allowed[0] = torch.zeros_like(exact[0])
    runs = [all_of(functools.partial(run, seed=seed), x, weight, gradient) for seed in seeds()]
    return [
        (list(draws), e, a)
        for draws, e, a in zip(zip(*runs, strict=True), exact, allowed, strict=True)
    ]


def all_of(
    layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, gradient: Tensor
) -> list[Tensor]:
    y = layer(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), gradient)]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("fmt", FORMATS_OF_PRODUCTS)
@pytest.mark.parametrize("channel", [False, True])
def test_output_and_gradients_are_right_on_average(layer: str, fmt: str, channel: bool) -> None:
    for draws, exact, allowed in results(layer, fmt, "stochastic", channel):
        assert greatest_z(draws, exact, allowed) < LARGEST_Z


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("fmt", FORMATS_OF_PRODUCTS)
def test_bias_test_detects_a_bias(layer: str, fmt: str) -> None:
    for draws, exact, allowed in results(layer, fmt, "floor", False):
        assert greatest_z(draws, exact, allowed) > 3 * LARGEST_Z


def test_gradients_that_are_exact_in_the_carrier_have_no_bias_left() -> None:
    torch.manual_seed(0)
    # Sums of one or two products of INT8 levels with 1 and -1 are integers that BF16 represents.
    x, weight = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5, requires_grad=True)
    gradient = torch.tensor([[1.0, -1.0], [1.0, 0.0]])
    exact = torch.autograd.grad(
        F.linear(x.double(), weight.double()), (x, weight), gradient.double()
    )
    run = linear("int8", "stochastic", False)
    draws = [torch.autograd.grad(run(x, weight, seed), (x, weight), gradient) for seed in seeds()]
    for samples, expected in zip(zip(*draws, strict=True), exact, strict=True):
        assert greatest_z(samples, expected.double()) < LARGEST_Z


def test_a_gradient_in_fp8_has_no_bias_left_where_the_product_is_exact() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 5, requires_grad=True), torch.randn(1, 5, requires_grad=True)
    gradient = torch.randn(8, 1)
    exact = gradient.double() @ weight.detach().double()
    # Products of FP8 and E5M2 values have seven bits, which BF16 represents.
    run = linear("fp8", "stochastic", False)
    draws = [torch.autograd.grad(run(x, weight, seed), x, gradient)[0] for seed in seeds()]
    assert greatest_z(draws, exact) < LARGEST_Z
