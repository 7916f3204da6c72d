"""Pooling and resampling: maxima, or means of a few neighbours, which no narrow float harms."""

from __future__ import annotations

from qsync_fx.ops.row import dependent, fixed

ROWS = (
    *dependent(
        "it pools neighbouring values, so it takes the precision of its inputs",
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
        "fractional_max_pool3d max_unpool2d max_unpool3d",
    ),
    *dependent(
        "it resamples, so it takes the precision of its inputs",
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d",
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
