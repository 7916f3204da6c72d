"""The `qsync::` operators and the lowerings that emit them.

Importing the package registers the operators of the namespace `qsync`. A module that lowers ATen
operators defines `LOWERINGS`; installed packages add theirs through the entry point group
`qsync_fx.lowerings`. Start reading at `linear.py`: forward and backward pass of one operator.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping

from qsync_fx.backend.operators.product_utils import round_gradients
from qsync_fx.entry_points import tuples
from qsync_fx.errors import QSyncError
from qsync_fx.graph.fx_utils import arguments
from qsync_fx.ops import table
from qsync_fx.passes.lowering_registry import Lowering, Operands, Role

__all__ = ["Lowering", "Operands", "Role", "arguments", "lowerings", "round_gradients"]


_MODULES = tuple(
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(__path__, f"{__name__}.")
)


@functools.cache
def lowerings() -> Mapping[str, Lowering]:
    """Return every lowering, also of installed packages, by the name of its operator row.

    Raise `QSyncError` if a package is broken, two lowerings claim one operator, or a lowering is
    for an operator without a row that accepts scaled formats.
    """
    sources = {module.__name__: tuple(getattr(module, "LOWERINGS", ())) for module in _MODULES}
    sources |= tuples("qsync_fx.lowerings", Lowering, "qsync_fx.backend.operators.Lowering")
    scaled = {row.name for row in table().values() if row.may_scale}
    result: dict[str, Lowering] = {}
    owner: dict[str, str] = {}
    for source, lowering in ((source, item) for source, items in sources.items() for item in items):
        name = lowering.name
        if name in result:
            raise QSyncError(
                f"two lowerings are registered for the operator {name}",
                where=f"{owner[name]} and {source}",
                do="remove one of them, or uninstall the package that adds it",
            )
        if name not in scaled:
            raise QSyncError(
                f"a lowering is registered for the operator {name}, but no row of that name "
                "supports scaled formats",
                where=source,
                do="add an OperatorRow with scaled=(activation, weight) to the entry point group "
                '"qsync_fx.ops"',
            )
        result[name], owner[name] = lowering, source
    return result
