"""The variance of a product whose two factors have independent errors.

For any product that is linear in each factor, P(a, b): a linear layer, a convolution of any kind, a matrix product of activations,
products in groups. An element of the result is a sum of products, each pair of errors independent of every other one, so variances are the
same product of squares: Var P(a + e, b + f) = P(Var e, b**2) + P(a**2, Var f) + P(Var e, Var f). No bound, and one more product each:
with one variance v for all elements of `a` and w for all of `b` a linear layer of N rows and D outputs has
N |b|**2 v + D |a|**2 w in all (QSync's equation 4 has |b|**2 v times the elements of `a`: too much by the width that is summed over).

Invariant: exact, to the last bit of the arithmetic, if errors of different elements are independent. A weight that a convolution reads in
many places errs in all of them alike, so that elements of the result are correlated; each element's variance is what is returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    product: Product, x: Tensor, weight: Tensor, gradient: Tensor, of_weight: Tensor, of_gradient: Tensor
) -> Tensor:
    """Returns the variance of each element of an input's gradient: what propagates, and what QSync's equation 5 leaves out."""
    of_x, _ = gradient_products(product, x, weight)
    return product_noise(of_x, gradient, weight, of_gradient, of_weight)


def lookup_noise(indices: Tensor, of_table: Tensor) -> Tensor:
    """Returns the variance of each element that an embedding looks up in a table; the same row errs alike wherever it is looked up."""
    return of_table[indices]
