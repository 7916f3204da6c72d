"""Sizes as people read them; symbolic sizes stay formulas."""

from __future__ import annotations

import math
from typing import Any

_STEPS = ("", "K", "M", "G", "T", "P")
_NO_TIME = 1e-12


def number(size: Any) -> int | float | None:
    """Returns a size as a number, which may be one of sympy's (shares of a whole add up to such); None for a formula."""
    if isinstance(size, (int, float)):
        return size
    if not getattr(size, "is_number", False):
        return None
    return int(size) if size.is_Integer else float(size)


def short(size: Any, unit: str = "") -> str:
    """Returns 1536000 as "1.54M"; a formula as itself; zero as "-"."""
    available = number(size)
    if available is None:
        return f"{size}{unit}"
    if available == 0:
        return "-"
    value, step = float(available), 0
    while abs(value) >= 1000 and step < len(_STEPS) - 1:
        value, step = value / 1000, step + 1
    return f"{value:.3g}{_STEPS[step]}{unit}"


def many(count: int, noun: str, several: str = "") -> str:
    """Returns 1 and "bucket" as "1 bucket", 2 as "2 buckets", or with the plural that is given."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def milliseconds(seconds: float) -> str:
    """Returns 0.0123 as "12.3"; what rounding leaves of zero as "0"."""
    return f"{0.0 if abs(seconds) < _NO_TIME else seconds * 1e3:.3g}"


def duration(seconds: float) -> str:
    """Returns 0.0123 as "12.3 ms"; zero, and what rounding leaves of it, as "-"."""
    if abs(seconds) < _NO_TIME:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def roughly(seconds: float) -> str:
    """Returns 42.3 as "42 s", 150 as "2.5 minutes", 5000 as "1.4 hours": what is foreseen, and nothing as "0 s"."""
    if seconds < 59.5:
        return f"{math.ceil(seconds) if seconds < 1 else round(seconds)} s"
    if seconds < 3570:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"


def round_step(least: float) -> float:
    """Returns a distance for the ticks of an axis: 1, 2 or 5 times a power of ten, no less than `least`, which is above zero."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))
