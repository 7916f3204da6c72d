"""What a node writes to.

Invariant: told by the schema, or by the operator's row where the schema keeps silent.
"""

from __future__ import annotations

import torch
from torch import fx

from qsync_fx.graph.nodes import arguments
from qsync_fx.ops import row_for


def writes(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments that a node writes to in place, whether its schema says so or its row."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    row = row_for(node.target)
    written: list[fx.Node] = []
    for at, (argument, value) in enumerate(zip(node.target._schema.arguments, arguments(node).values(), strict=True)):
        said = argument.alias_info is not None and argument.alias_info.is_write
        if said or (row is not None and at in row.writes):
            fx.node.map_arg(value, written.append)
    return written


def in_place(node: fx.Node) -> bool:
    """Whether a node's result is one of its arguments, written to (a batch norm writes to its statistics, but returns another tensor)."""
    written = writes(node)
    return bool(written) and written[0] is node.args[0] and str(node.target.__name__).partition(".")[0].endswith("_")  # type: ignore[union-attr]
