"""The allocators by name.

Invariant: an allocator is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Final

from qsync_fx.allocator.answer import Allocator
from qsync_fx.errors import OptionError, nearest

HOMES: Final[dict[str, tuple[str, str]]] = {"exact": ("qsync_fx.allocator.exact.exact", "Exact")}
"""By name, the module and the class."""


def allocator_of(which: str | Allocator) -> Allocator:
    """Returns an allocator, which may be given by name; raises `OptionError` where there is none."""
    if not isinstance(which, str):
        return which
    if which not in HOMES:
        raise OptionError(f"there is no allocator {which[:40]!r}", where="allocator", do=nearest(which[:40], HOMES))
    module, name = HOMES[which]
    found: Allocator = getattr(importlib.import_module(module), name)()
    return found
