"""Lookups in a table of weights."""

from __future__ import annotations

from qsync_fx.ops.row import Kind, OperatorRow, fixed

ROWS = (
    OperatorRow(
        "embedding",
        ("aten::embedding",),
        Kind.ADJUSTABLE,
        "a lookup in a table of weights: the plan chooses the precision of the rows it returns",
        operands=(0,),
        output_only=True,
    ),
    *fixed(
        "it adds rows of a table of weights up, which needs FP32",
        "embedding_bag _embedding_bag _embedding_bag_forward_only",
    ),
)
