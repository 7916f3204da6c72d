"""What is convolved: sizes of inputs, windows and outputs.

Invariant: all sizes are arrays of one length, so that many convolutions are reckoned at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qsync_fx.devices.analytic.tiles import Numbers

Product = Literal["output", "input_gradient", "weight_gradient"]


@dataclass(frozen=True)
class Shape:
    """Sizes of convolutions: batch, channels in, height, width, channels out, and of the window: height, width, strides, paddings."""

    n: Numbers
    c: Numbers
    h: Numbers
    w: Numbers
    k: Numbers
    r: Numbers
    s: Numbers
    down: Numbers
    across: Numbers
    above: Numbers
    beside: Numbers

    @classmethod
    def of(cls, *sizes: ArrayLike) -> Shape:
        """Returns shapes of n, c, h, w, k, r, s, two strides and two paddings."""
        return cls(*(np.atleast_1d(np.asarray(size, dtype=float)) for size in sizes))

    def at(self, where: NDArray[np.bool_]) -> Shape:
        """Returns some of the shapes."""
        return Shape(*(getattr(self, field.name)[where] for field in fields(self)))

    def batch(self, n: Numbers) -> Shape:
        """Returns the shapes with another batch."""
        return replace(self, n=n)

    @property
    def high(self) -> Numbers:
        """Places of a column of the output."""
        return np.asarray(np.floor((self.h + 2 * self.above - self.r) / self.down) + 1)

    @property
    def wide(self) -> Numbers:
        """Places of a row of the output."""
        return np.asarray(np.floor((self.w + 2 * self.beside - self.s) / self.across) + 1)

    @property
    def places(self) -> Numbers:
        """Places of the output, over the batch."""
        return self.n * self.high * self.wide

    @property
    def window(self) -> Numbers:
        return self.r * self.s

    @property
    def skipped(self) -> Numbers:
        """Of how many places of the input one is the middle of a window."""
        return self.down * self.across

    @property
    def input(self) -> Numbers:
        """Values of the input."""
        return self.n * self.c * self.h * self.w

    @property
    def weights(self) -> Numbers:
        return self.k * self.c * self.window

    @property
    def output(self) -> Numbers:
        """Values of the output."""
        return self.places * self.k
