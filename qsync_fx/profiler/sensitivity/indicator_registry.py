"""Registry of the sensitivity methods by name.

Each module of this package that implements methods defines `METHODS`, a tuple of `MethodSpec`; a
new method is a new module (docs/howto-indicator.md). All methods estimate the variance that is
added to the gradients of all parameters, except "hessian", "fisher" and "random", whose numbers
only rank operators.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from qsync_fx.entry_points import listed_in_modules
from qsync_fx.errors import ProfileError, nearest
from qsync_fx.profiler.sensitivity.gradient_step import MethodSpec


@functools.cache
def methods() -> Mapping[str, MethodSpec]:
    """Return all methods by name."""
    return listed_in_modules("qsync_fx.profiler.sensitivity", "METHODS")


def method(name: str) -> MethodSpec:
    """Return the method called `name`; raise `ProfileError` if there is none."""
    if name not in methods():
        raise ProfileError(
            f"{name!r} is no method to find a sensitivity", do=nearest(str(name), methods())
        )
    return methods()[name]
