"""Quantization that the model itself does."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = fixed(
    "the model quantizes here by itself",
    "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine _fake_quantize_learnable_per_tensor_affine "
    "_fake_quantize_learnable_per_channel_affine fused_moving_avg_obs_fake_quant quantize_per_tensor "
    "quantize_per_channel quantize_per_tensor_dynamic dequantize _int_mm _scaled_mm _scaled_grouped_mm "
    "_weight_int8pack_mm _weight_int4pack_mm",
)
