"""The ways to round, by the names that options, operators and kernels share."""

from __future__ import annotations

from typing import Final, Literal, get_args

from qsync_fx.errors import OptionError, nearest

Rounding = Literal["stochastic", "nearest", "floor"]
"""stochastic: up with the probability of the fraction (QSync, section IV-A). nearest: ties to even. floor: to minus infinity."""

ROUNDINGS: Final[tuple[Rounding, ...]] = get_args(Rounding)


def rounding_mode(name: str) -> Rounding:
    """Returns `name` if it is a way to round; raises `OptionError` naming the nearest one otherwise."""
    if name not in ROUNDINGS:
        raise OptionError(f"{name!r} is not a way to round", do=nearest(str(name), ROUNDINGS))
    return name
