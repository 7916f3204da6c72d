"""Reductions: those whose result stays within its inputs, and those whose result grows out of them."""

from __future__ import annotations

from qsync_fx.ops.row import dependent, fixed

ROWS = (
    *dependent(
        "its result lies within the range of its inputs, so it takes their precision",
        "mean nanmean max min amax amin aminmax median nanmedian",
    ),
    *fixed(
        "it adds many values, and the total needs more range and resolution than they have",
        "sum nansum sum_to_size cumsum logcumsumexp _logcumsumexp trace trapezoid trapz cumulative_trapezoid "
        "segment_reduce scatter_reduce index_reduce",
    ),
    *fixed("it multiplies many values, which leaves the range of a narrow float", "prod cumprod"),
    *fixed(
        "it squares and adds, which leaves the range of a narrow float",
        "norm native_norm frobenius_norm nuclear_norm linalg_norm linalg_vector_norm linalg_matrix_norm var std "
        "var_mean std_mean dist cdist _cdist_forward _euclidean_dist pdist _pdist_forward pairwise_distance "
        "cosine_similarity cov corrcoef",
    ),
    *fixed("it takes differences of neighbours, which cancel", "diff gradient"),
)
