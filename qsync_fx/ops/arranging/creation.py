"""Operators that make tensors out of numbers."""

from __future__ import annotations

from qsync_fx.ops.row import fixed

ROWS = fixed(
    "it makes a tensor of the type that the model asks for",
    "zeros zeros_like ones ones_like full full_like empty empty_like empty_strided empty_permuted new_zeros new_ones "
    "new_full new_empty new_empty_strided arange range linspace logspace eye scalar_tensor tril_indices triu_indices "
    "bartlett_window blackman_window hamming_window hann_window kaiser_window _efficientzerotensor "
    "_new_zeros_with_same_feature_meta",
)
