"""Human-readable sizes and durations; symbolic sizes stay formulas."""

from __future__ import annotations

import math
from typing import Any

_STEPS = ("", "K", "M", "G", "T", "P")
_NO_TIME = 1e-12


def number(size: Any) -> int | float | None:
    """Return a size as a number, converted from sympy if necessary; None for a formula."""
    if isinstance(size, (int, float)):
        return size
    if not getattr(size, "is_number", False):
        return None
    return int(size) if size.is_Integer else float(size)


def short(size: Any, unit: str = "") -> str:
    """Return 1536000 as "1.54M", a formula unchanged, and zero as "-"."""
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
    """Return 1 and "bucket" as "1 bucket", 2 as "2 buckets"; `several` is an irregular plural."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def milliseconds(seconds: float) -> str:
    """Return 0.0123 as "12.3", and rounding errors of zero as "0"."""
    return f"{0.0 if abs(seconds) < _NO_TIME else seconds * 1e3:.3g}"


def duration(seconds: float) -> str:
    """Return 0.0123 as "12.3 ms", and zero within rounding errors as "-"."""
    if abs(seconds) < _NO_TIME:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def roughly(seconds: float) -> str:
    """Return an estimate: 42.3 as "42 s", 150 as "2.5 minutes", 5000 as "1.4 hours"."""
    if seconds < 1:
        return f"{math.ceil(seconds)} s"
    if seconds < 59.5:
        return f"{round(seconds)} s"
    if seconds < 3570:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours"
