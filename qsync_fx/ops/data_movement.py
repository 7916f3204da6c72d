"""Rows of data movement: views, copies, lookups, indexing, creation, conversions and writes.

They compute no new values. The passes preserve conversions and quantization in the model.
"""

from __future__ import annotations

from qsync_fx.ops.spec import Kind, OperatorRow, dependent, fixed

ROWS = (
    *fixed(
        "a conversion that the model itself asks for",
        "to _to_copy type_as chalf _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half "
        "_cast_Int _cast_Long _cast_Short _autocast_to_full_precision "
        "_autocast_to_reduced_precision",
        converts=True,
    ),
    *fixed(
        "it makes a tensor of the type that the model asks for",
        "zeros zeros_like ones ones_like full full_like empty empty_like empty_strided "
        "empty_permuted new_zeros new_ones new_full new_empty new_empty_strided arange range "
        "linspace logspace eye scalar_tensor tril_indices triu_indices bartlett_window "
        "blackman_window hamming_window hann_window kaiser_window _efficientzerotensor "
        "_new_zeros_with_same_feature_meta",
    ),
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
    *dependent(
        "it picks values, so it takes the precision of its inputs",
        "gather index _unsafe_index _unsafe_masked_index index_select take take_along_dim "
        "masked_select",
    ),
    *dependent(
        "it puts values in place, so it takes the precision of its inputs",
        "masked_fill masked_scatter index_put _unsafe_index_put "
        "_unsafe_masked_index_put_accumulate index_fill index_copy index_add scatter scatter_add "
        "select_scatter slice_scatter diagonal_scatter put fill_diagonal",
    ),
    *fixed(
        "the model quantizes here by itself",
        "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine "
        "_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_channel_affine "
        "fused_moving_avg_obs_fake_quant quantize_per_tensor quantize_per_channel "
        "quantize_per_tensor_dynamic dequantize _int_mm _scaled_mm _scaled_grouped_mm "
        "_weight_int8pack_mm _weight_int4pack_mm",
    ),
    *dependent(
        "it changes the shape and no value, so it takes the precision of its inputs",
        "view reshape reshape_as view_as _unsafe_view _reshape_alias flatten unflatten ravel "
        "permute transpose t numpy_T mT mH matrix_H adjoint swapaxes swapdims movedim moveaxis "
        "squeeze unsqueeze expand expand_as broadcast_to broadcast_tensors narrow select slice "
        "unbind chunk split split_with_sizes unsafe_chunk unsafe_split unsafe_split_with_sizes "
        "tensor_split hsplit vsplit dsplit diagonal linalg_diagonal diag diag_embed diagflat "
        "unfold atleast_1d atleast_2d atleast_3d meshgrid",
        moves=True,
    ),
    *dependent(
        "it copies values, so it takes the precision of its inputs",
        "clone contiguous alias detach data detach_copy alias_copy lift_fresh lift_fresh_copy "
        "lift repeat view_copy _reshape_copy expand_copy permute_copy transpose_copy t_copy "
        "squeeze_copy unsqueeze_copy select_copy slice_copy narrow_copy unbind_copy split_copy "
        "split_with_sizes_copy diagonal_copy unfold_copy pin_memory resolve_conj resolve_neg",
        moves=True,
    ),
    *dependent(
        "it copies values, so it takes the precision of its inputs",
        "cat concat concatenate stack _stack _chunk_cat hstack vstack dstack column_stack "
        "row_stack block_diag tile repeat_interleave roll flip fliplr flipud rot90 tril triu "
        "pad_sequence cartesian_prod combinations channel_shuffle native_channel_shuffle "
        "pixel_shuffle pixel_unshuffle im2col constant_pad_nd pad _pad_enum _pad_circular "
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d",
    ),
    # A converted view is a copy without the surrounding memory that strides may reach.
    *dependent(
        "it reads memory by strides, so it takes the precision of its input, whose strides stay "
        "as they are",
        "as_strided as_strided_copy",
    ),
    *fixed(
        "it reads memory by its layout, which a conversion would change",
        "as_strided_scatter view.dtype view_copy.dtype slice_inverse",
    ),
    *fixed(
        "it writes into a tensor, whose type stays as it is",
        "copy fill zero set resize resize_as set_data requires_grad_ retain_grad",
    ),
)
