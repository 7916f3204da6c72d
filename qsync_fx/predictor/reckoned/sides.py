"""The sides of a product, found from how many values it reads and makes, and from its operations.

A product of b matrices of m by k with b of k by n reads bmk and bkn values, makes bmn, and takes 2bmnk operations: four numbers for four
sides. Of a convolution the result's shape is known; how large its window is and how far it strides follows from how many values it reads,
if there is one way that fits.

Invariant: what is returned reads, makes and computes exactly what was given; None where nothing of this kind does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_WINDOWS = (1, 3, 5, 7, 9, 11, 2, 4, 14, 16)
"""Heights of square windows, in the order in which they are tried."""


@dataclass(frozen=True)
class Product:
    """`batch` products of m by k with k by n."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Window:
    """A convolution with a square window: sizes as in `Device.conv_seconds`."""

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    stride: int
    padding: int


def product(first: int, second: int, result: int, flops: int) -> Product | None:
    """Returns the sides of a product that reads `first` and `second` values."""
    multiplied = flops // 2
    if min(first, second, result, multiplied) < 1:
        return None
    batch = round(first * second * result / multiplied**2)
    if batch < 1:
        return None
    k, m, n = (multiplied // size for size in (result, second, first))
    found = Product(batch, m, n, k)
    fits = (batch * m * k, batch * k * n, batch * m * n, 2 * batch * m * n * k) == (first, second, result, flops)
    return found if fits else None


def convolution(read: int, weights: int, result: tuple[int, ...]) -> Window | None:
    """Returns the sizes of a convolution of `read` values with `weights`, whose result has a shape of four sizes; None with groups."""
    if len(result) != 4 or min(result) < 1 or weights % result[1]:
        return None
    n, k, high, wide = result
    inner = weights // k
    for r in _WINDOWS:
        c, left = divmod(inner, r * r)
        if left or not c or read % (n * c):
            continue
        for stride in range(1, 17):
            found = _placed(read // (n * c), high, wide, r, stride)
            if found is not None:
                return Window(n, c, *found[:2], k, r, stride, found[2])
    return None


def _placed(places: int, high: int, wide: int, r: int, stride: int) -> tuple[int, int, int] | None:
    """Returns height, width and padding of an input of so many places; of several paddings that which keeps the size."""
    for padding in range(r // 2, -1, -1) if r > 1 else (0,):
        for h in range((high - 1) * stride + r - 2 * padding, high * stride + r - 2 * padding):
            if h > 0 and places % h == 0:
                w = places // h
                if (w + 2 * padding - r) // stride + 1 == wide and w + 2 * padding >= r and _like(h, w, high, wide):
                    return h, w, padding
    return None


def _like(h: int, w: int, high: int, wide: int) -> bool:
    return math.isclose(h / w, high / wide, rel_tol=0.35)
