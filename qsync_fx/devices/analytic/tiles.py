"""How long a matrix product takes that is computed tile by tile.

The result is cut into tiles and k into parts. A processor computes as many tiles at once as fit; tiles are handed out in waves, and the
last one may leave processors idle. A tile takes as long as its multiplications at the unit's rate, or as its steps' latency where too few
tiles share a processor to hide it. Meanwhile operands and results go through memory. A library picks the tile and the number of parts
that are fastest.

Invariant: seconds are positive, and all sizes may be arrays that broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qsync_fx.devices.constants import Tiles

Numbers = NDArray[np.float64]

_EDGES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (128, 32),
    (32, 128),
    (64, 32),
    (32, 64),
    (32, 32),
)
_SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
_TALLEST = 128
_AREA_AT_ONCE = 32768.0
"""Values of results that one processor holds at once: what fits its registers."""


@dataclass(frozen=True)
class Machine:
    """What tiles are computed with.

    Attributes:
        processors: how many.
        clock: cycles a second.
        peak: operations a second of all of them.
        bandwidth: bytes a second.
    """

    processors: int
    clock: float
    peak: float
    bandwidth: float


def tiled(
    by: Tiles,
    on: Machine,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    moved: ArrayLike,
    slower: ArrayLike = 1.0,
    efficiency: float = 1.0,
    smallest: int | None = None,
) -> Numbers:
    """Returns the seconds of products of m by k with k by n, without the launch.

    Args:
        moved: bytes that are read and written once.
        slower: factor of what each tile takes.
        efficiency: fraction of the constants' own.
        smallest: edge of the smallest tile, where it is not that of the constants.
    """
    m, n, k, moved, slower = (_column(value) for value in (m, n, k, moved, slower))
    least = smallest or by.smallest
    edges = np.array([edge for edge in _EDGES if min(edge) >= least], dtype=float)
    rows, columns = edges[:, 0][:, None], edges[:, 1][:, None]
    parts = np.array([float(split) for split in _SPLITS if split <= by.splits])
    area = rows * columns
    relative = 2 * area / (rows + columns) / 128.0
    reached = by.efficiency * np.minimum(relative**by.small_tiles, 1.1) * efficiency
    busy = 2 * area / (on.peak / on.processors * reached) * slower
    idle = np.maximum(by.latency * (area / 4096.0) ** 0.25 / on.clock * slower, busy / by.alone)
    at_once = np.clip(np.floor(_AREA_AT_ONCE / area), 1, 8)
    tiles = np.ceil(m / rows) * np.ceil(n / columns) * parts
    waves = np.floor(tiles / (on.processors * at_once))
    last = np.ceil((tiles - waves * on.processors * at_once) / on.processors)
    steps = np.ceil(k / parts / by.step) * by.step + by.prologue
    computing = (
        waves * np.maximum(at_once * busy, idle) + np.where(last > 0, np.maximum(last * busy, idle), 0.0)
    ) * steps
    sums = np.where(parts > 1, 2 * parts * m * n * 4.0 * by.reduction, 0.0)
    memory = (moved + sums) / (on.bandwidth * by.memory)
    both = (computing**by.overlap + memory**by.overlap) ** (1 / by.overlap)
    both = both + np.where(parts > 1, by.launch / 2, 0.0)
    if by.tallest:
        both = np.where(rows == np.clip(2 ** np.ceil(np.log2(m)), least, _TALLEST), both, np.inf)
    found: Numbers = both.min((1, 2))
    return found


def throttled(by: Tiles, seconds: Numbers) -> Numbers:
    """Returns what work takes whose clock is limited by power the longer it lasts."""
    return np.asarray(seconds * (1 + by.throttle * np.log1p(seconds / 1e-3)))


def _column(value: Any) -> Numbers:
    return np.atleast_1d(np.asarray(value, dtype=float))[:, None, None]
