"""How long the three products of a convolution take: implicit matrix products, or Winograd's in FP32.

    product            m            n               k
    output             channels out places out      channels in and window
    input_gradient     channels in  places in       channels out and window
    weight_gradient    channels out channels in     places out
                                    and window

Tensor cores take the channels of one place of the window a step at a time, so that few channels cost as many as a step has; the gradient
of the weight has tiles of its own for each place of the window.

Invariant: seconds are positive; all sizes may be arrays of one length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from qsync_fx.devices.analytic.tiles import Machine, Numbers, tiled
from qsync_fx.devices.constants import Convolution

Product = Literal["output", "input_gradient", "weight_gradient"]


@dataclass(frozen=True)
class Shape:
    """Sizes of convolutions: batch, channels in, height, width, channels out, the window's height and width, stride, padding."""

    n: Numbers
    c: Numbers
    h: Numbers
    w: Numbers
    k: Numbers
    r: Numbers
    s: Numbers
    stride: tuple[Numbers, Numbers]
    padding: tuple[Numbers, Numbers]

    @classmethod
    def of(cls, *sizes: ArrayLike) -> Shape:
        """Returns shapes of n, c, h, w, k, r, s, two strides and two paddings."""
        n, c, h, w, k, r, s, *rest = (np.atleast_1d(np.asarray(size, dtype=float)) for size in sizes)
        return cls(n, c, h, w, k, r, s, (rest[0], rest[1]), (rest[2], rest[3]))

    @property
    def places(self) -> Numbers:
        """Places of the output, over the batch."""
        high = np.floor((self.h + 2 * self.padding[0] - self.r) / self.stride[0]) + 1
        wide = np.floor((self.w + 2 * self.padding[1] - self.s) / self.stride[1]) + 1
        return np.asarray(self.n * high * wide)

    @property
    def window(self) -> Numbers:
        return self.r * self.s

    @property
    def skipped(self) -> Numbers:
        """Of how many places of the input one is the middle of a window."""
        return self.stride[0] * self.stride[1]


def convolved(by: Convolution, on: Machine, shape: Shape, product: Product, width: int, tensor_cores: bool) -> Numbers:
    """Returns the seconds of one product of convolutions of values of `width` bytes."""
    seconds, features = uncorrected(by, on, shape, product, width, tensor_cores)
    left = sum((power * features[name] for name, power in by.corrections.items()), start=np.zeros(len(seconds)))
    return np.asarray(seconds * np.exp(left))


def uncorrected(
    by: Convolution, on: Machine, shape: Shape, product: Product, width: int, tensor_cores: bool
) -> tuple[Numbers, Mapping[str, Numbers]]:
    """Returns the seconds before corrections, and what those are about."""
    m, n, k = _sides(by, shape, product, tensor_cores)
    read = shape.n * shape.c * shape.h * shape.w * width
    written = shape.places * shape.k * width
    weights = shape.k * shape.c * shape.window * width
    slower = 1 + by.gather * (shape.window > 1)
    seconds = tiled(by, on, m, n, k, read + written + weights, slower)
    bandwidth = on.bandwidth * by.memory
    if tensor_cores:
        seconds = seconds + by.relayout * (read + written) / bandwidth
    elif product == "input_gradient":
        seconds = seconds + by.relayout * np.where(shape.skipped > 1, read, 0.0) / bandwidth
    seconds, transformed = _winograd(by, on, shape, product, seconds, read + written, weights)
    features = {
        "m": np.log(m / 128),
        "n": np.log(n / 4096),
        "k": np.log(k / 1024),
        "window": shape.window > 1,
        "strided": shape.skipped > 1,
        "thin": shape.c <= 4,
        "single": shape.c == 1,
        "tall": shape.r >= 5,
        "winograd": transformed,
        "all": np.ones(len(m)),
    }
    return seconds + by.launch, {name: feature.astype(float) for name, feature in features.items()}


FEATURES = ("m", "n", "k", "window", "strided", "thin", "single", "tall", "winograd", "all")
"""What corrections may be about."""


def _sides(by: Convolution, of: Shape, product: Product, tensor_cores: bool) -> tuple[Numbers, Numbers, Numbers]:
    def stepped(channels: Numbers, step: int) -> Numbers:
        return np.ceil(channels / step) * step if tensor_cores else channels

    if product == "output":
        return of.k, of.places, stepped(of.c, by.step) * of.window
    if product == "weight_gradient":
        return of.k, stepped(of.c, by.smallest) * of.window, of.places
    # A stride leaves places of the input that no window, or fewer values of one, has anything to do with.
    pointwise = of.window == 1
    places = np.where(pointwise, of.places * of.skipped ** (1 - by.strided), of.n * of.h * of.w)
    window = np.where(pointwise, 1.0, np.maximum(1.0, of.window / of.skipped**by.strided))
    return of.c, places, stepped(of.k, by.step) * window


_TRANSFORMED = 128
"""Channels from which libraries transform the gradient of a weight."""


def _winograd(
    by: Convolution, on: Machine, of: Shape, product: Product, direct: Numbers, moved: Numbers, weights: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns the seconds with Winograd's algorithm where that is what is used, and where it is."""
    serves = (of.skipped == 1) & (of.r == of.s) & ((of.r == 3) | (of.r == 5))
    if product == "weight_gradient":
        serves &= (of.r == 3) & (np.minimum(of.c, of.k) >= _TRANSFORMED)
    if not by.winograd or not serves.any():
        return direct, np.zeros(len(direct))
    own = (of.n >= by.winograd_batch) | (of.r > 3) | (product == "weight_gradient")
    found = direct
    for edge, efficiency, chosen in ((4.0, by.winograd, serves & own), (2.0, by.winograd_fused, serves & ~own)):
        if not efficiency or not chosen.any():
            continue
        across = edge + of.r - 1
        high, wide = (of.h + 2 * of.padding[0] - of.r + 1), (of.w + 2 * of.padding[1] - of.s + 1)
        patches = of.n * np.ceil(high / edge) * np.ceil(wide / edge)
        m, n, k = {
            "output": (of.k, patches, of.c),
            "input_gradient": (of.c, patches, of.k),
            "weight_gradient": (of.k, of.c, patches),
        }[product]
        # One product for each place of a transformed patch, side by side.
        together = np.ceil(n / 64) * 64 * across**2
        data, filters = (of.k + of.c) * patches * across**2 * 4.0, of.k * of.c * across**2 * 4.0
        kernels = edge > 2
        inside = data + filters if kernels else moved + weights
        seconds = tiled(by, on, m, together, k, inside, efficiency=efficiency)
        around = (moved + data) * by.winograd_data * kernels + (weights + filters) * by.winograd_weights
        seconds = seconds + around / (on.bandwidth * by.memory) + 2 * by.launch * kernels
        found = np.where(chosen & (seconds < 1.15 * direct), seconds, found)
    return found, (found != direct).astype(float)
