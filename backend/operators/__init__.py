"""The lowered operators: what adjustable operators become, forward and backward beside each other.

Importing this package registers the operators of the namespace `qsync`, which is all that importing it does.

Invariant: one module an operator. A module that lowers ATen operators holds `LOWERINGS`, a tuple of `Lowering`; a new operator is a new
module and its row in `qsync_fx.ops`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from qsync_fx.errors import QSyncError
from qsync_fx.passes.lowering import Lowering, Operands, Role

__all__ = ["Lowering", "Operands", "Role", "lowerings"]

_MODULES = tuple(importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))


@functools.cache
def lowerings() -> Mapping[str, Lowering]:
    """Returns every lowering by the name of its operator row."""
    found: dict[str, Lowering] = {}
    for module in _MODULES:
        for lowering in getattr(module, "LOWERINGS", ()):
            if lowering.name in found:
                raise QSyncError(
                    f"two lowerings claim the operator {lowering.name}",
                    where=module.__name__,
                    do="remove one of them",
                )
            found[lowering.name] = lowering
    return found
