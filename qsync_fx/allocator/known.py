"""The allocators by name.

Invariant: an allocator is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Final

from qsync_fx.allocator.answer import Allocator
from qsync_fx.errors import OptionError, nearest

HOMES: Final[dict[str, tuple[str, str]]] = {
    "exact": ("qsync_fx.allocator.exact.exact", "Exact"),
    "paper": ("qsync_fx.allocator.paper", "Greedy"),
    "uniform": ("qsync_fx.allocator.baselines", "Uniform"),
    "full-precision": ("qsync_fx.allocator.baselines", "FullPrecision"),
    "random": ("qsync_fx.allocator.baselines", "Random"),
}
"""By name, the module and the class. Allocators that take something more to be made are not among them."""
MADE: Final[dict[str, tuple[str, str]]] = {
    "hessian": (
        "the curvature of each operator",
        'give qsync_fx.allocator.baselines.Hessian(qsync_fx.sensitivity(..., method="hessian")), or qsync plan --compare --hessian',
    ),
    "dynamic-batches": (
        "the model with other batches, and makes plans for those",
        "give qsync_fx.allocator.baselines.DynamicBatches(resized), or see qsync plan MODULE:CALLABLE --compare",
    ),
}
"""Those, by name: what each takes, and how it is had."""


def allocator_of(which: str | Allocator) -> Allocator:
    """Returns an allocator, which may be given by name; raises `OptionError` where there is none."""
    if not isinstance(which, str):
        return which
    if which in MADE:
        what, do = MADE[which]
        raise OptionError(f"the allocator {which!r} takes {what} to be made", where="allocator", do=do)
    if which not in HOMES:
        raise OptionError(f"there is no allocator {which[:40]!r}", where="allocator", do=nearest(which[:40], HOMES))
    module, name = HOMES[which]
    return _made(module, name)


def allocators() -> dict[str, Allocator]:
    """Returns the allocators that take any problem, by name."""
    return {which: _made(*home) for which, home in HOMES.items()}


def _made(module: str, name: str) -> Allocator:
    found: Allocator = getattr(importlib.import_module(module), name)()
    return found
