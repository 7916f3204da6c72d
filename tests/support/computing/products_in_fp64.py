"""FP64 results of lowered products from their exact operands, with error bounds.

The bounds follow from the documented roundings: FP32 sums, and one rounding each of the product to
the compute dtype and of the result to its dtype.
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
    """Tensor in a format, `q * scale`."""

    q: Tensor
    scale: Tensor | None

    @property
    def value(self) -> Tensor:
        return self.q.double() if self.scale is None else self.q.double() * self.scale.double()


def operand(
    t: Tensor, fmt: str, rounding: str, keep: Sequence[int], stream: int, seed: Tensor = SEED
) -> Operand:
    """Round `t` to a format as the graph does before an operator."""
    if FORMATS[fmt].scaled:
        return Operand(*quantize(t.detach(), seed, stream, fmt, rounding, keep))
    return Operand(round_to(t.detach(), seed, stream, fmt, rounding), None)


def unit(dtype: torch.dtype | None) -> float:
    """Return the largest relative error of rounding to nearest; 0 without rounding."""
    return 0.0 if dtype is None else torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Product:
    """Bilinear product of two FP64 tensors plus a bias, with values for error bounds.

    Attributes:
        product: the product, FP64.
        value: product plus bias.
        magnitude: product of magnitudes plus magnitude of the bias.
        terms: largest number of summands of a value.
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

    def assert_met(self, actual: Tensor, carrier: torch.dtype | None) -> None:
        """Assert that `actual` equals the value within a product's roundings in compute dtype
        `carrier`; None means exact products.
        """
        assert actual.shape == self.value.shape
        error = (actual.double() - self.value).abs()
        # Denormals, which a BF16 product may flush to zero, add an absolute error.
        bound = (self.terms + 8) * (unit(torch.float32) * self.magnitude + 2.0**-126) + unit(
            carrier
        ) * self.product.abs()
        bound += unit(actual.dtype) * (self.value.abs() + bound)
        assert (error <= bound).all(), f"the error is {(error / bound).max()} times the bound"
