"""Rounding noise of tensors, and its propagation through products.

Let u be the fractional position of an element between its neighbours on the format's grid, at
distance s. Stochastic rounding has no bias and the variance s**2 u (1 - u); rounding to nearest or
toward minus infinity has a fixed error (QSync, Proposition 2). Results are FP64 and do not include
saturation. The grid equals `qsync_fx.backend.numerics.reference`'s (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from qsync_fx.formats import Precision
from qsync_fx.rounding import Rounding

SMALLEST_SCALE: Final = 2.0**-126
"""Scale of tensors whose largest magnitude is too small to divide by the number of levels."""


def scale(x: Tensor, fmt: Precision, keep: Sequence[int] = ()) -> Tensor:
    """Return the scale of `x` in a format: FP64, size 1 in dimensions that share a scale.

    The scale is 1 for formats without a scale and for groups that are empty or all zeros, and NaN
    for groups that contain NaN or Inf. Dimensions in `keep` have one scale per index.
    """
    if not fmt.scaled or not x.numel():
        return x.new_ones((), dtype=torch.float64)
    saved = {dim % x.dim() for dim in keep}
    shared = [dim for dim in range(x.dim()) if dim not in saved]
    magnitude = x.detach().abs()
    largest = (magnitude.amax(shared, keepdim=True) if shared else magnitude).float()
    # In FP32, like the quantizer: the last bit of a scale affects every element.
    result = (largest / fmt.max).clamp(min=SMALLEST_SCALE).double()
    result = torch.where(largest == 0, torch.ones_like(result), result)
    return torch.where(largest.isfinite(), result, torch.full_like(result, torch.nan))


def step(x: Tensor, fmt: Precision) -> Tensor:
    """Return the grid spacing at each element of `x`, which is already divided by its scale; FP64.

    It is 1 for integers. For floats it is `2**(e - k)`, with mantissa bits k and the element's
    exponent e, at least the exponent of the format's smallest normal number.
    """
    if fmt.kind == "integer":
        return torch.ones_like(x, dtype=torch.float64)
    _, exponent = torch.frexp(x.detach().double())
    # `frexp` returns a mantissa in [1/2, 1). Zeros and non-finite values get the smallest exponent.
    owned = torch.where(x.isfinite() & (x != 0), exponent - 1, torch.full_like(exponent, fmt.e_min))
    return torch.exp2((owned.clamp(min=fmt.e_min) - fmt.mantissa).double())


def noise(
    x: Tensor, fmt: Precision, rounding: Rounding = "stochastic", keep: Sequence[int] = ()
) -> Tensor:
    """Return the expected square of each element's error from rounding, without saturation.

    For stochastic rounding it is the variance. Non-finite elements have no noise in formats without
    a scale. In scaled formats they make their whole group NaN.
    """
    if rounding != "stochastic":
        return error(x, fmt, rounding, keep).square()
    if fmt.kind == "integer":
        # |frac| suffices as u (1 - u) is symmetric. FP32 resolves 127 and its fractions to 2**-17.
        size = scale(x, fmt, keep)
        fraction = (x.detach() / size.to(x.dtype)).frac().abs()
        return (fraction * (1 - fraction)) * size.square().expand(x.shape)
    fraction, size = _fractions(x, fmt, keep)
    return fraction * (1 - fraction) * size.square()


def error(x: Tensor, fmt: Precision, rounding: Rounding, keep: Sequence[int] = ()) -> Tensor:
    """Return the error of each element for deterministic rounding, "nearest" or "floor"."""
    if rounding == "stochastic":
        raise ValueError("the error of a stochastic rounding is random: see noise")
    if fmt.plain and rounding == "nearest" and x.dtype is torch.float32:
        # torch's own conversion runs, and the difference is exact. Non-finite results are no noise.
        value = x.detach()
        difference = value.to(fmt.dtype).to(value.dtype) - value
        return difference.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).double()
    fraction, size = _fractions(x, fmt, keep)
    up = fraction > 0.5 if rounding == "nearest" else torch.zeros_like(fraction, dtype=torch.bool)
    return torch.where(up, 1 - fraction, -fraction) * size


def _fractions(x: Tensor, fmt: Precision, keep: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return each element's fractional position on the grid, in [0, 1), and the grid spacing."""
    factor = scale(x, fmt, keep)
    units = x.detach().double() / factor
    size = step(units, fmt)
    full = (units.clamp(-fmt.max, fmt.max) if fmt.scaled else units) / size
    fraction = full - full.floor()
    valid = full.isfinite() | factor.isnan()
    return torch.where(valid, fraction, torch.zeros_like(fraction)), size * factor


Product = Callable[[Tensor, Tensor], Tensor]
"""Function linear in each factor: `lambda x, w: torch.nn.functional.conv2d(x, w, stride=2)`."""


def product_noise(product: Product, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    """Return the variance of each element of `product(a, b)` for independent errors e and f.

    The same product of squares propagates variances:

        Var P(a + e, b + f) = P(Var e, b**2) + P(a**2, Var f) + P(Var e, Var f)

    It is exact if the errors of different elements are independent. The elements of the result may
    be correlated, as a convolution reads each weight many times. With constant variances v and w, a
    linear layer with N rows and D outputs has N |b|**2 v + D |a|**2 w in total; QSync, Eq. (4), is
    larger by a factor of the reduced dimension. `of_a` and `of_b` are the elements' variances.
    """
    a, b = a.double(), b.double()
    return product(of_a.double(), b.square() + of_b) + product(a.square(), of_b.double())
