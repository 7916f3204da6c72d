"""What lowered products have to compute, in FP64 from the very operands that they are given, with
bounds of the error.

The bounds are those of the roundings that the operators state, and nothing else: sums in FP32, one
rounding of the product to its carrier, one of the result to its type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_fx.backend.operators.quantize import quantize, round_to
from qsync_fx.formats import FORMATS

SEED = torch.tensor([7083142659001])


@dataclass(frozen=True)
class Operand:
    """A tensor in a format, `q * scale`."""

    q: Tensor
    scale: Tensor | None

    @property
    def value(self) -> Tensor:
        return self.q.double() if self.scale is None else self.q.double() * self.scale.double()


def operand(
    t: Tensor, fmt: str, rounding: str, keep: Sequence[int], stream: int, seed: Tensor = SEED
) -> Operand:
    """Rounds `t` to a format as the graph does before an operator."""
    if FORMATS[fmt].scaled:
        return Operand(*quantize(t.detach(), seed, stream, fmt, rounding, keep))
    return Operand(round_to(t.detach(), seed, stream, fmt, rounding), None)


def unit(dtype: torch.dtype | None) -> float:
    """The largest relative error of rounding to the nearest; 0 where nothing is rounded."""
    return 0.0 if dtype is None else torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Product:
    """A bilinear product of two FP64 tensors, plus a bias, and what bounds the error of computing
    it narrowly.

    Attributes:
        product: its value, FP64.
        value: product and bias.
        magnitude: the same of magnitudes.
        terms: the largest number of summands of one value.
    """

    product: Tensor
    value: Tensor
    magnitude: Tensor
    terms: float

    @staticmethod
    def of(
        multiply: Callable[[Tensor, Tensor], Tensor],
        first: Tensor,
        second: Tensor,
        bias: Tensor | None = None,
    ) -> Product:
        product, magnitude = multiply(first, second), multiply(first.abs(), second.abs())
        counts = multiply(torch.ones_like(first), torch.ones_like(second))
        terms = counts.max().item() if counts.numel() else 0.0
        if bias is None:
            return Product(product, product, magnitude, terms)
        return Product(product, product + bias.double(), magnitude + bias.double().abs(), terms)

    def assert_met(self, found: Tensor, carrier: torch.dtype | None) -> None:
        """Asserts that `found` is the value, up to the roundings of a product in `carrier` (None:
        exact) and of its own type.
        """
        assert found.shape == self.value.shape
        error = (found.double() - self.value).abs()
        # Denormals, which a product in BF16 may flush to zero, have an absolute error.
        bound = (self.terms + 8) * (unit(torch.float32) * self.magnitude + 2.0**-126) + unit(
            carrier
        ) * self.product.abs()
        bound += unit(found.dtype) * (self.value.abs() + bound)
        assert (error <= bound).all(), f"an error of {(error / bound).max()} times what is allowed"
