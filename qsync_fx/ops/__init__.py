"""The operator table: one declarative row per ATen operator.

Each module here defines `ROWS`, a tuple of `OperatorRow` (spec.py); installed packages add rows
through the entry point group `qsync_fx.ops`. `row_for` looks up a node's target.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from qsync_fx.entry_points import tuples
from qsync_fx.errors import QSyncError
from qsync_fx.ops.spec import Flops, Kind, OperatorRow, Place
from qsync_fx.torch_internals import OpOverload

__all__ = ["Flops", "Kind", "OperatorRow", "Place", "row_for", "table"]


@functools.cache
def table() -> Mapping[str, OperatorRow]:
    """Return every row by target ("aten::linear"), including rows of installed packages."""
    sources: dict[str, tuple[OperatorRow, ...]] = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if not module.ispkg and module.name != f"{__name__}.spec":
            sources[module.name] = importlib.import_module(module.name).ROWS
    sources |= tuples("qsync_fx.ops", OperatorRow, "qsync_fx.ops.OperatorRow")
    result: dict[str, OperatorRow] = {}
    owner: dict[str, str] = {}
    for source, rows in sources.items():
        for row in rows:
            for target in row.targets:
                if target in result:
                    raise QSyncError(
                        f"two rows claim the operator {target}",
                        where=f"{owner[target]} and {source}",
                        do="remove one of them, or uninstall the package that adds it",
                    )
                result[target], owner[target] = row, source
    return result


def row_for(target: Any) -> OperatorRow | None:
    """Return the row of a node's target; None for an unknown operator."""
    return _row_of(target) if isinstance(target, OpOverload) else None


@functools.cache
def _row_of(target: OpOverload) -> OperatorRow | None:
    name, overload, rows = target._schema.name, target._overloadname, table()
    # An in-place operator has the row of its out-of-place form: `relu_` the row of `relu`.
    plain = name.removesuffix("_")
    names = (f"{name}.{overload}", name, f"{plain}.{overload}", plain)
    row = next((rows[entry] for entry in names if entry in rows), None)
    if row is None or not any(argument.is_out for argument in target._schema.arguments):
        return row
    reason = "it writes into a tensor that already has a type"
    return dataclasses.replace(
        row,
        kind=Kind.FIXED,
        reason=reason,
        operands=(),
        scaled=(),
        contracts=None,
        output_only=False,
    )
