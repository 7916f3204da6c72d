"""Operators that read or write at indices."""

from __future__ import annotations

from qsync_fx.ops.row import dependent

ROWS = (
    *dependent(
        "it picks values, so it takes the precision of its inputs",
        "gather index _unsafe_index _unsafe_masked_index index_select take take_along_dim masked_select",
    ),
    *dependent(
        "it puts values in place, so it takes the precision of its inputs",
        "masked_fill masked_scatter index_put _unsafe_index_put _unsafe_masked_index_put_accumulate index_fill "
        "index_copy index_add scatter scatter_add select_scatter slice_scatter diagonal_scatter put fill_diagonal",
    ),
)
