"""What rounding one tensor to a format does to each of its elements.

With u the fraction of an element between its neighbours at distance s, stochastic rounding adds a variance of `s**2 u (1 - u)` and no bias;
rounding to nearest, or towards minus infinity, errs by the same each time. Where u is uniform these are s**2/6, s**2/12 and s**2/3 in the
mean, which is what is used where no tensor is at hand (QSync's proposition 2, which takes one exponent for a whole tensor).

Invariant: for any tensor, what is returned has its shape and is FP64. Saturation is no noise: it is reported apart.

The grid of a format around a tensor: its scale, and the distance of the two values that an element lies between.

Invariant: that of `qsync_fx.backend.numerics.reference`, in FP64. A test holds the two together: a plan is reckoned with what will run.

The variance of a product whose two factors have independent errors.

For any product that is linear in each factor, P(a, b): a linear layer, a convolution of any kind, a matrix product of activations,
products in groups. An element of the result is a sum of products, each pair of errors independent of every other one, so variances are the
same product of squares: Var P(a + e, b + f) = P(Var e, b**2) + P(a**2, Var f) + P(Var e, Var f). No bound, and one more product each:
with one variance v for all elements of `a` and w for all of `b` a linear layer of N rows and D outputs has
N |b|**2 v + D |a|**2 w in all (QSync's equation 4 has |b|**2 v times the elements of `a`: too much by the width that is summed over).

Invariant: exact, to the last bit of the arithmetic, if errors of different elements are independent. A weight that a convolution reads in
many places errs in all of them alike, so that elements of the result are correlated; each element's variance is what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from qsync_fx.formats import Precision
from qsync_fx.rounding import Rounding

SMALLEST_SCALE: Final = 2.0**-126
"""Of what has a largest magnitude that is less than a format's levels can divide."""


def scale(x: Tensor, fmt: Precision, keep: Sequence[int] = ()) -> Tensor:
    """Returns what a scaled format divides `x` by: FP64, 1 in each dimension that shares a scale; 1 for formats without one.

    A group of zeros, or without elements, has scale 1; one that holds NaN or Inf has scale NaN.

    Args:
        keep: dimensions with a scale per index; none for one scale.
    """
    if not fmt.scaled or not x.numel():
        return x.new_ones((), dtype=torch.float64)
    saved = {dim % x.dim() for dim in keep}
    shared = [dim for dim in range(x.dim()) if dim not in saved]
    magnitude = x.detach().abs()
    largest = (magnitude.amax(shared, keepdim=True) if shared else magnitude).float()
    # In FP32, as the quantizer divides: the last bit of a scale moves every element.
    result = (largest / fmt.max).clamp(min=SMALLEST_SCALE).double()
    result = torch.where(largest == 0, torch.ones_like(result), result)
    return torch.where(largest.isfinite(), result, torch.full_like(result, torch.nan))


def step(x: Tensor, fmt: Precision) -> Tensor:
    """Returns the distance of the neighbours of each element of `x`, already divided by its scale: 1 for integers, FP64.

    Of floats it is `2**(e - k)` with the element's own exponent e, at least that of the format's smallest normal number.
    """
    if fmt.kind == "integer":
        return torch.ones_like(x, dtype=torch.float64)
    _, exponent = torch.frexp(x.detach().double())
    # `frexp` gives a mantissa in [1/2, 1); zeros and what is not finite have no exponent and get the smallest.
    owned = torch.where(x.isfinite() & (x != 0), exponent - 1, torch.full_like(exponent, fmt.e_min))
    return torch.exp2((owned.clamp(min=fmt.e_min) - fmt.mantissa).double())


MEAN_SQUARE: dict[Rounding, float] = {"stochastic": 1 / 6, "nearest": 1 / 12, "floor": 1 / 3}
"""The mean square error of a rounding in units of the step's square, where fractions are uniform."""


def noise(
    x: Tensor, fmt: Precision, rounding: Rounding = "stochastic", keep: Sequence[int] = ()
) -> Tensor:
    """Returns the expected square of the error of each element of `x` that rounding to `fmt` makes, without saturation.

    Of stochastic rounding it is the variance. Elements that are not finite are handed on as they are by formats without a scale: no noise;
    a group with a scale is lost as a whole: NaN.
    """
    if rounding != "stochastic":
        return error(x, fmt, rounding, keep).square()
    if fmt.kind == "integer":
        # Of a negative fraction the same comes out as of what is left of it to 1. FP32 holds 127 and its fractions to 2**-17.
        size = scale(x, fmt, keep)
        fraction = (x.detach() / size.to(x.dtype)).frac().abs()
        return (fraction * (1 - fraction)) * size.square().expand(x.shape)
    fraction, size = _fractions(x, fmt, keep)
    return fraction * (1 - fraction) * size.square()


def error(x: Tensor, fmt: Precision, rounding: Rounding, keep: Sequence[int] = ()) -> Tensor:
    """Returns what rounding adds to each element where nothing is random: to "nearest", or by "floor" towards minus infinity.

    Raises:
        ValueError: the rounding is stochastic.
    """
    if rounding == "stochastic":
        raise ValueError("the error of a stochastic rounding is random: see noise")
    if fmt.plain and rounding == "nearest" and x.dtype is torch.float32:
        # Torch's conversion is what runs, and the difference is exact. What is not finite, or becomes so, is no noise.
        value = x.detach()
        return (
            (value.to(fmt.dtype).to(value.dtype) - value)
            .nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            .double()
        )
    fraction, size = _fractions(x, fmt, keep)
    up = fraction > 0.5 if rounding == "nearest" else torch.zeros_like(fraction, dtype=torch.bool)
    return torch.where(up, 1 - fraction, -fraction) * size


def _fractions(x: Tensor, fmt: Precision, keep: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns where each element lies between its neighbours, in [0, 1), and how far these are apart."""
    factor = scale(x, fmt, keep)
    units = x.detach().double() / factor
    size = step(units, fmt)
    full = (units.clamp(-fmt.max, fmt.max) if fmt.scaled else units) / size
    fraction = full - full.floor()
    return torch.where(
        full.isfinite() | factor.isnan(), fraction, torch.zeros_like(fraction)
    ), size * factor


def expected_noise(
    x: Tensor, fmt: Precision, rounding: Rounding = "stochastic", keep: Sequence[int] = ()
) -> Tensor:
    """Returns the same where fractions are taken for uniform: what is left of `noise` when elements move by less than a step."""
    factor = scale(x, fmt, keep)
    square = (step(x.detach().double() / factor, fmt) * factor).square() * MEAN_SQUARE[rounding]
    # Zero lies on every grid, however small the steps around it.
    return torch.where(x != 0, square, torch.zeros_like(square)).expand(x.shape)


def saturation(x: Tensor, fmt: Precision, keep: Sequence[int] = ()) -> Tensor:
    """Returns the square of what each element loses because it lies beyond the format's range; infinite where it becomes Inf.

    A scaled format ends where its tensor does, so that nothing is lost there. Of other formats, torch's own give Inf, and the rest their
    largest value.
    """
    value = x.detach().double()
    if fmt.scaled:
        return torch.zeros_like(value)
    beyond = (value.abs() - fmt.max).clamp(min=0)
    if fmt.plain:
        # What is nearer to the largest value than to the next power of two is rounded to it.
        half = 2.0 ** (_exponent(fmt.max) - fmt.mantissa - 1)
        beyond = torch.where(beyond >= half, torch.full_like(beyond, torch.inf), beyond)
    return torch.where(value.isfinite(), beyond, torch.zeros_like(beyond)).square()


def _exponent(value: float) -> int:
    return int(torch.frexp(torch.tensor(value, dtype=torch.float64))[1]) - 1


Product = Callable[[Tensor, Tensor], Tensor]
"""Linear in each of its factors: `lambda x, w: torch.nn.functional.conv2d(x, w, stride=2)`."""


def product_noise(product: Product, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    """Returns the variance of each element of `product(a, b)`.

    Args:
        a, b: the factors without their errors.
        of_a, of_b: the variance of each of their elements.
    """
    a, b = a.double(), b.double()
    return product(of_a.double(), b.square() + of_b) + product(a.square(), of_b.double())


def gradient_products(product: Product, a: Tensor, b: Tensor) -> tuple[Product, Product]:
    """Returns the two products of a layer's backward pass: of (gradient, b), the gradient of `a`, and of (gradient, a), that of `b`.

    Each is linear in both of its factors, as what it differentiates is.
    """

    def of_first(gradient: Tensor, other: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = torch.zeros_like(a, dtype=other.dtype).requires_grad_()
            return torch.autograd.grad(product(leaf, other), leaf, gradient.to(other.dtype))[0]

    def of_second(gradient: Tensor, other: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = torch.zeros_like(b, dtype=other.dtype).requires_grad_()
            return torch.autograd.grad(product(other, leaf), leaf, gradient.to(other.dtype))[0]

    return of_first, of_second


def weight_gradient_noise(
    product: Product, x: Tensor, weight: Tensor, gradient: Tensor, of_x: Tensor, of_gradient: Tensor
) -> Tensor:
    """Returns the variance of each element of a weight's gradient; `x` and `gradient` are rounded, each on its own."""
    _, of_weight = gradient_products(product, x, weight)
    return product_noise(of_weight, gradient, x, of_gradient, of_x)


def input_gradient_noise(
    product: Product,
    x: Tensor,
    weight: Tensor,
    gradient: Tensor,
    of_weight: Tensor,
    of_gradient: Tensor,
) -> Tensor:
    """Returns the variance of each element of an input's gradient: what propagates, and what QSync's equation 5 leaves out."""
    of_x, _ = gradient_products(product, x, weight)
    return product_noise(of_x, gradient, weight, of_gradient, of_weight)


def lookup_noise(indices: Tensor, of_table: Tensor) -> Tensor:
    """Returns the variance of each element that an embedding looks up in a table; the same row errs alike wherever it is looked up."""
    return of_table[indices]
