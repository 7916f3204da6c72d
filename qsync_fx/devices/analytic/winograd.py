"""How long Winograd's algorithm takes for the products of a convolution: fewer multiplications, in patches that are transformed.

Windows of 3 by 3 and 5 by 5 that move one place at a time have it. Patches of 4 by 4 results have kernels of their own for the transforms,
which go through memory; batches below a size have none of those. For windows of 3 by 3, but not for the gradient of a weight, patches of
2 by 2 results are transformed within the kernel that multiplies, side by side in blocks of 8 by 8.

Invariant: where it does not serve it takes for ever, so that the faster of it and another algorithm can be taken; no batch takes longer
than a larger one.
"""

from __future__ import annotations

import numpy as np

from qsync_fx.devices.analytic.shapes import Product, Shape
from qsync_fx.devices.analytic.tiles import Machine, Numbers, tiled
from qsync_fx.devices.constants import Convolution

_LARGE, _SMALL = 4.0, 2.0
"""Edges of patches: with transforms of their own, and without."""
_BLOCK = 8.0
_FUSED = 32
"""Edge of the smallest tile of products whose patches are transformed within their kernel."""
_FEWEST = 16
"""Channels in and out, from which it is used."""


def winograd(by: Convolution, on: Machine, of: Shape, product: Product) -> Numbers:
    """Returns the seconds with Winograd's algorithm."""
    found = np.full(len(of.n), np.inf)
    square = (of.r == of.s) & ((of.r == 3) | (of.r == 5))
    serves = (of.skipped == 1) & square & (np.minimum(of.c, of.k) >= _FEWEST)
    if not by.winograd or not serves.any():
        return found
    fusing = (of.r == 3) & (product != "weight_gradient") & (by.winograd_fused > 0)
    some = of.at(serves)
    # A small batch never takes longer than the smallest that has kernels for its transforms.
    batch = np.where(fusing[serves], np.maximum(some.n, by.winograd_batch), some.n)
    found[serves] = _apart(by, on, some.batch(batch), product)
    if (at := serves & fusing).any():
        found[at] = np.minimum(found[at], _fused(by, on, of.at(at), product))
    return found


def _apart(by: Convolution, on: Machine, of: Shape, product: Product) -> Numbers:
    patches = of.n * np.ceil(of.high / _LARGE) * np.ceil(of.wide / _LARGE)
    values = (_LARGE + of.r - 1) ** 2
    data, filters = (of.k + of.c) * patches * values * 4.0, of.k * of.c * values * 4.0
    seconds = _multiplied(by, on, of, product, patches, values, data + filters, by.winograd, by.winograd_smallest)
    around = (4.0 * (of.input + of.output) + data) * by.winograd_data + (
        4.0 * of.weights + filters
    ) * by.winograd_weights
    return np.asarray(seconds + around / (on.bandwidth * by.memory) + 2 * by.launch)


def _fused(by: Convolution, on: Machine, of: Shape, product: Product) -> Numbers:
    patches = of.n * np.ceil(of.high / _BLOCK) * np.ceil(of.wide / _BLOCK) * (_BLOCK / _SMALL) ** 2
    values = (_SMALL + of.r - 1) ** 2
    moved = 4.0 * (of.input + of.output + of.weights)
    seconds = _multiplied(by, on, of, product, patches, values, moved, by.winograd_fused, _FUSED)
    around = (4.0 * of.weights + of.k * of.c * values * 4.0) * by.winograd_weights
    return np.asarray(seconds + around / (on.bandwidth * by.memory))


def _multiplied(
    by: Convolution,
    on: Machine,
    of: Shape,
    product: Product,
    patches: Numbers,
    values: Numbers,
    moved: Numbers,
    efficiency: float,
    edge: int,
) -> Numbers:
    m, n, k = {
        "output": (of.k, patches, of.c),
        "input_gradient": (of.c, patches, of.k),
        "weight_gradient": (of.k, of.c, patches),
    }[product]
    # One product for each value of a transformed patch, side by side.
    return tiled(by, on, m, np.ceil(n / edge) * edge * values, k, moved, efficiency=efficiency, smallest=edge)
