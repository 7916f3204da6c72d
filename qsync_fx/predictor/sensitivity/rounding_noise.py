"""What rounding one tensor to a format does to each of its elements.

With u the fraction of an element between its neighbours at distance s, stochastic rounding adds a variance of `s**2 u (1 - u)` and no bias;
rounding to nearest, or towards minus infinity, errs by the same each time. Where u is uniform these are s**2/6, s**2/12 and s**2/3 in the
mean, which is what is used where no tensor is at hand (QSync's proposition 2, which takes one exponent for a whole tensor).

Invariant: for any tensor, what is returned has its shape and is FP64. Saturation is no noise: it is reported apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qsync_fx.precision import Precision
from qsync_fx.predictor.sensitivity.grid import scale, step
from qsync_fx.rounding.mode import Rounding

MEAN_SQUARE: dict[Rounding, float] = {"stochastic": 1 / 6, "nearest": 1 / 12, "floor": 1 / 3}
"""The mean square error of a rounding in units of the step's square, where fractions are uniform."""


def noise(x: Tensor, fmt: Precision, rounding: Rounding = "stochastic", keep: Sequence[int] = ()) -> Tensor:
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
        return (value.to(fmt.dtype).to(value.dtype) - value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).double()
    fraction, size = _fractions(x, fmt, keep)
    up = fraction > 0.5 if rounding == "nearest" else torch.zeros_like(fraction, dtype=torch.bool)
    return torch.where(up, 1 - fraction, -fraction) * size


def _fractions(x: Tensor, fmt: Precision, keep: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns where each element lies between its neighbours, in [0, 1), and how far these are apart."""
    factor = scale(x, fmt, keep)
    units = x.detach().double() / factor
    size = step(units, fmt)
    whole = (units.clamp(-fmt.max, fmt.max) if fmt.scaled else units) / size
    fraction = whole - whole.floor()
    return torch.where(whole.isfinite() | factor.isnan(), fraction, torch.zeros_like(fraction)), size * factor


def expected_noise(x: Tensor, fmt: Precision, rounding: Rounding = "stochastic", keep: Sequence[int] = ()) -> Tensor:
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
