"""How long the three products of a convolution take: implicit matrix products, or Winograd's in FP32 where those are faster.

    product            m            n               k
    output             channels out places out      channels in and window
    input_gradient     channels in  places in       channels out and window
    weight_gradient    channels out channels in     places out
                                    and window

Tensor cores take the channels of one place of the window a step at a time, so that few channels cost as many as a step has; the gradient
of the weight has tiles of its own for each place of the window. The gradient of the input has, for each of the places that a stride skips,
the values of the window that meet it.

Invariant: seconds are positive; all sizes may be arrays of one length.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qsync_fx.devices.analytic.shapes import Product, Shape
from qsync_fx.devices.analytic.tiles import Machine, Numbers, throttled, tiled
from qsync_fx.devices.analytic.winograd import winograd
from qsync_fx.devices.constants import Convolution


def convolved(by: Convolution, on: Machine, shape: Shape, product: Product, width: int, tensor_cores: bool) -> Numbers:
    """Returns the seconds of one product of convolutions of values of `width` bytes."""
    seconds = uncorrected(by, on, shape, product, width, tensor_cores)
    if not by.corrections:
        return seconds
    features = traits(by, shape, product, tensor_cores)
    left = sum((power * features[name] for name, power in by.corrections.items()), start=np.zeros(len(seconds)))
    return np.asarray(seconds * np.exp(left))


def uncorrected(
    by: Convolution, on: Machine, shape: Shape, product: Product, width: int, tensor_cores: bool
) -> Numbers:
    """Returns the seconds before corrections."""
    inputs, written, weights = shape.input * width, shape.output * width, shape.weights * width
    gradient = product == "input_gradient"
    # Of the rows of an input some are skipped; within one, what is skipped is read with what is not.
    read = inputs if gradient else inputs * np.minimum(1.0, shape.r / shape.down)
    seconds = _direct(by, on, shape, product, read + written + weights, tensor_cores)
    bandwidth = on.bandwidth * by.memory
    if tensor_cores:
        seconds = seconds + by.relayout * (read + written) / bandwidth
    elif gradient:
        seconds = seconds + by.relayout * np.where(shape.skipped > 1, inputs, 0.0) / bandwidth
    seconds = seconds + by.weights * weights / bandwidth
    if tensor_cores and product != "output":
        # Kernels for tensor cores take no padding as large as the window; the ordinary units have an eighth of their rate.
        ordinary = 2 * shape.output * shape.c * shape.window / (on.peak / 8 * by.ordinary)
        seconds = seconds + np.where(shape.above >= shape.r, ordinary, 0.0)
    if not tensor_cores:
        seconds = np.minimum(seconds, winograd(by, on, shape, product))
    seconds = throttled(by, seconds) + by.launch
    return np.asarray((seconds**_SHARP + by.floor**_SHARP) ** (1 / _SHARP))


_SHARP = 8


def traits(by: Convolution, of: Shape, product: Product, tensor_cores: bool) -> Mapping[str, Numbers]:
    """Returns what corrections may be about."""
    m, n, k = _sides(by, of, product, tensor_cores)
    served = (of.skipped == 1) & (of.r == of.s) & ((of.r == 3) | (of.r == 5)) & (not tensor_cores and by.winograd > 0)
    found = {
        "m": np.log(m / 128),
        "n": np.log(n / 4096),
        "k": np.log(k / 1024),
        "window": of.window > 1,
        "strided": of.skipped > 1,
        "thin": of.c <= 4,
        "single": of.c == 1,
        "tall": of.r >= 5,
        "winograd": served,
        "all": np.ones(len(m)),
    }
    return {name: np.asarray(feature, dtype=float) for name, feature in found.items()}


FEATURES = ("m", "n", "k", "window", "strided", "thin", "single", "tall", "winograd", "all")
"""The names of those."""


def _direct(by: Convolution, on: Machine, of: Shape, product: Product, moved: Numbers, tensor_cores: bool) -> Numbers:
    m, n, k = _sides(by, of, product, tensor_cores)
    pointwise = of.window == 1
    seconds = np.zeros(len(m))
    for at, smallest, slower in (
        (pointwise, by.pointwise or by.smallest, 1.0),
        (~pointwise, by.smallest, 1 + by.gather),
    ):
        if at.any():
            seconds[at] = tiled(by, on, m[at], n[at], k[at], moved[at], slower, smallest=smallest)
    return seconds


def _sides(by: Convolution, of: Shape, product: Product, tensor_cores: bool) -> tuple[Numbers, Numbers, Numbers]:
    def stepped(channels: Numbers, step: Numbers | int) -> Numbers:
        return np.asarray(np.ceil(channels / step) * step) if tensor_cores else channels

    if product == "output":
        return of.k, of.places, stepped(of.c, by.step) * of.window
    if product == "weight_gradient":
        # An image of one channel lies as tensor cores want it, and has a kernel of its own.
        tile = np.where(of.c == 1, by.step, by.smallest)
        places = of.n * np.ceil(of.high * of.wide / by.places) * by.places
        return of.k, stepped(of.c, tile) * of.window, places
    pointwise = of.window == 1
    places = np.where(pointwise, of.places * of.skipped ** (1 - by.strided), of.n * of.h * of.w)
    return of.c, places, stepped(of.k, by.step) * np.ceil(of.r / of.down) * np.ceil(of.s / of.across)
