"""How long a matrix product takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from qsync_fx.devices.analytic.tiles import Machine, Numbers, throttled, tiled
from qsync_fx.devices.constants import Tiles

Layout = Literal["nn", "tn", "nt"]
"""Which factor is transposed, as BLAS counts, which sees matrices by columns: of a linear layer the output is "tn", the gradient of its
input "nn", that of its weight "nt"."""


def multiplied(
    by: Tiles,
    on: Machine,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    layout: str | Sequence[str],
    width: int,
    result: int,
) -> Numbers:
    """Returns the seconds of products of m by k with k by n: values of `width` bytes to ones of `result` bytes."""
    layouts = [layout] if isinstance(layout, str) else layout
    m, n, k = (np.atleast_1d(np.asarray(side, dtype=float)) for side in (m, n, k))
    moved = (m * k + k * n) * width + m * n * result
    # Rows of a first factor that is not transposed begin m values apart.
    odd = (m % by.alignment > 0) & np.array([one[0] == "n" for one in layouts])
    slower = np.array([by.layouts.get(one, 1.0) for one in layouts]) * np.where(odd, by.misaligned, 1.0)
    seconds = tiled(by, on, m, n, k, moved, slower)
    return throttled(by, seconds) + by.launch
