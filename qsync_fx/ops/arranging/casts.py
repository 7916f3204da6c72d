"""Conversions that the model itself asks for. The passes keep them as they are."""

from __future__ import annotations

import dataclasses

from qsync_fx.ops.row import fixed

ROWS = tuple(
    dataclasses.replace(row, converts=True)
    for row in fixed(
        "a conversion that the model itself asks for",
        "to _to_copy type_as chalf _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long "
        "_cast_Short _autocast_to_full_precision _autocast_to_reduced_precision",
    )
)
