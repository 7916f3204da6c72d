"""The grid of a format around a tensor: its scale, and the distance of the two values that an element lies between.

Invariant: that of `qsync_fx.backend.numerics.reference`, in FP64. A test holds the two together: a plan is reckoned with what will run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from qsync_fx.precision import Precision

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
    kept = {dim % x.dim() for dim in keep}
    shared = [dim for dim in range(x.dim()) if dim not in kept]
    magnitude = x.detach().abs()
    largest = (magnitude.amax(shared, keepdim=True) if shared else magnitude).float()
    # In FP32, as the quantizer divides: the last bit of a scale moves every element.
    found = (largest / fmt.max).clamp(min=SMALLEST_SCALE).double()
    found = torch.where(largest == 0, torch.ones_like(found), found)
    return torch.where(largest.isfinite(), found, torch.full_like(found, torch.nan))


def step(x: Tensor, fmt: Precision) -> Tensor:
    """Returns the distance of the neighbours of each element of `x`, already divided by its scale: 1 for integers, FP64.

    Of floats it is `2**(e - k)` with the element's own exponent e, at least that of the format's smallest normal number.
    """
    if fmt.kind == "integer":
        return torch.ones_like(x, dtype=torch.float64)
    _, exponent = torch.frexp(x.detach().double())
    # `frexp` gives a mantissa in [1/2, 1); zeros and what is not finite have no exponent and get the smallest.
    own = torch.where(x.isfinite() & (x != 0), exponent - 1, torch.full_like(exponent, fmt.e_min))
    return torch.exp2((own.clamp(min=fmt.e_min) - fmt.mantissa).double())
