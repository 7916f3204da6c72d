"""Operators that write into a tensor that already has a type."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = fixed(
    "it writes into a tensor, whose type stays as it is",
    "copy fill zero set resize resize_as set_data requires_grad_ retain_grad",
)
