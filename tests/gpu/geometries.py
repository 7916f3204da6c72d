"""Convolutions to test a kernel with: small and odd, with every kind of window that it serves."""

from __future__ import annotations

from collections.abc import Iterator

from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem
from qsync_fx.backend.cuda.selection import constraints

Pair = tuple[int, int]
WINDOWS: tuple[tuple[int, int, Pair, Pair, Pair], ...] = (
    # r, s, padding, stride, dilation
    (3, 3, (1, 1), (1, 1), (1, 1)),
    (1, 1, (0, 0), (1, 1), (1, 1)),
    (3, 3, (1, 1), (2, 2), (1, 1)),
    (1, 1, (0, 0), (2, 2), (1, 1)),
    (5, 3, (2, 0), (1, 1), (2, 1)),
    (2, 3, (0, 1), (2, 1), (1, 1)),
    (7, 7, (3, 3), (2, 2), (1, 1)),
)
MOST = 6


def problems(config: KernelConfig) -> list[ConvProblem]:
    """Return problems that a kernel serves: less than a tile first, then several tiles with a
    remainder in each dimension.

    Raise AssertionError if there is none: the kernel would go untested.
    """
    served = [problem for problem in _all(config) if constraints.serves(config, problem) is None][
        :MOST
    ]
    assert served, f"no test problem is served by {config.name}"
    return served


def _all(config: KernelConfig) -> Iterator[ConvProblem]:
    step = max(config.alignment, config.out_alignment)
    fprop = config.operation == "fprop"
    for window, (n, h, w, c, k) in zip(
        [*WINDOWS, *WINDOWS],
        [(1, 9, 10, step, step)] * len(WINDOWS)
        + [(3, 17, 14, 3 * step, _up(160, step))] * len(WINDOWS),
        strict=True,
    ):
        yield ConvProblem(
            config.operation,  # type: ignore[arg-type]
            n, h, w, c, k, *window, config.a, config.b, config.out,
            a_scale=config.a_scale, b_scale=config.b_scale, bias=config.bias and fprop,
        )  # fmt: skip


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
