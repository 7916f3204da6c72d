"""Rows of reductions: norms, softmax, losses, pooling, sums and means.

Statistics and parameters of norms, losses and their inputs stay in FP32. A reduction follows its
inputs if its result stays in their range, otherwise it is fixed.
"""

from __future__ import annotations

from qsync_fx.ops.spec import Kind, OperatorRow, dependent, fixed

REASON = (
    "a normalisation: the plan chooses among the float precisions, statistics and parameters stay "
    "in FP32"
)


def row(
    name: str, *targets: str, alone: tuple[int, int] | None = None, writes: tuple[int, ...] = ()
) -> OperatorRow:
    every = tuple(f"aten::{target}" for target in (name, *targets))
    return OperatorRow(
        name, every, Kind.ADJUSTABLE, REASON, operands=(0,), alone=alone, writes=writes
    )


ROWS = (
    # On the CPU torch accepts an FP32 bias with a narrow input only if the weight is FP32 too.
    row("layer_norm", "native_layer_norm", alone=(3, 2)),
    row("group_norm", "native_group_norm"),
    row(
        "batch_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update",
        writes=(3, 4),
    ),
    row("instance_norm", alone=(2, 1), writes=(3, 4)),
    row("rms_norm", "_fused_rms_norm"),
    *fixed(
        "it normalises a weight by its length, a sum of squares that needs FP32",
        "_weight_norm _weight_norm_interface norm_except_dim renorm embedding_renorm",
    ),
    OperatorRow(
        "softmax",
        ("aten::softmax", "aten::_softmax", "aten::_safe_softmax", "aten::special_softmax"),
        Kind.ADJUSTABLE,
        "a softmax: the plan chooses among the float precisions",
        operands=(0,),
    ),
    *fixed(
        "a logarithm of probabilities feeds a loss, and stays in FP32 with it",
        "log_softmax _log_softmax special_log_softmax log_sigmoid log_sigmoid_forward logsumexp "
        "special_logsumexp logaddexp logaddexp2 _masked_softmax",
        loss=True,
    ),
    *fixed(
        "a loss and its inputs stay in FP32",
        "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd nll_loss_forward nll_loss2d_forward "
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits kl_div ctc_loss _ctc_loss poisson_nll_loss "
        "soft_margin_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward "
        "margin_ranking_loss hinge_embedding_loss cosine_embedding_loss triplet_margin_loss",
        loss=True,
    ),
    *dependent(
        "its result lies within the range of its inputs, so it takes their precision",
        "mean nanmean max min amax amin aminmax median nanmedian",
    ),
    *fixed(
        "it adds many values, and the total needs more range and resolution than they have",
        "sum nansum sum_to_size cumsum logcumsumexp _logcumsumexp trace trapezoid trapz "
        "cumulative_trapezoid segment_reduce scatter_reduce index_reduce",
    ),
    *fixed("it multiplies many values, which leaves the range of a narrow float", "prod cumprod"),
    *fixed(
        "it squares and adds, which leaves the range of a narrow float",
        "norm native_norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm "
        "linalg_matrix_norm var std var_mean std_mean dist cdist _cdist_forward _euclidean_dist "
        "pdist _pdist_forward pairwise_distance cosine_similarity cov corrcoef",
    ),
    *fixed("it takes differences of neighbours, which cancel", "diff gradient"),
    *dependent(
        "it pools neighbouring values, so it takes the precision of its inputs",
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
        "max_pool3d_with_indices avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d "
        "max_unpool2d max_unpool3d",
    ),
    *dependent(
        "it resamples, so it takes the precision of its inputs",
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d "
        "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d",
    ),
    *fixed(
        "torch has no kernel for it in a narrow float on every device",
        "avg_pool3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    *dependent("it adds overlapping patches, so it takes the precision of its inputs", "col2im"),
    *fixed(
        "it samples at coordinates, and a rounded coordinate is another place",
        "grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator",
    ),
)
