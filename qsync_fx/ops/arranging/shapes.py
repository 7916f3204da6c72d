"""Operators that move values and change none."""

from __future__ import annotations

import dataclasses

from qsync_fx.ops.row import OperatorRow, dependent, fixed


def moving(reason: str, names: str) -> tuple[OperatorRow, ...]:
    return tuple(dataclasses.replace(row, moves=True) for row in dependent(reason, names))


ROWS = (
    *moving(
        "it changes the shape and no value, so it takes the precision of its inputs",
        "view reshape reshape_as view_as _unsafe_view _reshape_alias flatten unflatten ravel permute transpose t "
        "numpy_T mT mH matrix_H adjoint swapaxes swapdims movedim moveaxis squeeze unsqueeze expand expand_as "
        "broadcast_to broadcast_tensors narrow select slice unbind chunk split split_with_sizes unsafe_chunk "
        "unsafe_split unsafe_split_with_sizes tensor_split hsplit vsplit dsplit diagonal linalg_diagonal diag "
        "diag_embed diagflat unfold atleast_1d atleast_2d atleast_3d meshgrid",
    ),
    *moving(
        "it copies values, so it takes the precision of its inputs",
        "clone contiguous alias detach data detach_copy alias_copy lift_fresh lift_fresh_copy lift repeat view_copy _reshape_copy "
        "expand_copy permute_copy transpose_copy t_copy squeeze_copy unsqueeze_copy select_copy slice_copy narrow_copy unbind_copy "
        "split_copy split_with_sizes_copy diagonal_copy unfold_copy pin_memory resolve_conj resolve_neg",
    ),
    *dependent(
        "it copies values, so it takes the precision of its inputs",
        "cat concat concatenate stack _stack _chunk_cat hstack vstack dstack column_stack row_stack block_diag tile "
        "repeat_interleave roll flip fliplr flipud rot90 tril triu pad_sequence cartesian_prod combinations "
        "channel_shuffle native_channel_shuffle pixel_shuffle pixel_unshuffle im2col constant_pad_nd pad _pad_enum "
        "_pad_circular reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d",
    ),
    # Of a converted view there is a copy, without the memory around it that strides may reach.
    *dependent(
        "it reads memory by strides, so it takes the precision of its input, whose strides stay as they are",
        "as_strided as_strided_copy",
    ),
    *fixed(
        "it reads memory by its layout, which a conversion would change",
        "as_strided_scatter view.dtype view_copy.dtype slice_inverse",
    ),
)
