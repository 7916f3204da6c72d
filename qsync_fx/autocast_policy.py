"""Conversion policy of torch.autocast for each operator.

The dispatcher reports whether autocast has a kernel for an operator, so new torch versions need no
new list. Only operators that autocast lowers or promotes are listed, because all its other kernels
run in FP32. Composite operators have no autocast kernel, since autocast applies to the operators
that they call; they are listed in `_COMPOSED`.

Invariant: an operator that runs outside of autocast on arguments converted by `policy` is bit-exact
to the operator under autocast. The autocast pass, which replaces regions by explicit casts, relies
on this.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

from qsync_fx import torch_internals as internals

Policy = Literal["lower", "fp32", "promote", "inside"]
"""Conversion of floating-point arguments, except FP64, which autocast never converts.

lower: to autocast's dtype. fp32: to FP32. promote: to the widest dtype among the arguments. inside:
autocast converts values inside the operator, so the operator must run under autocast.
"""

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


_LOWER = {
    "cpu": _names(
        "_addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm "
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d "
        "linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention"
    ),
    "cuda": _names(
        "_convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell "
        "_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d "
        "conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution "
        "cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot "
        "linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell "
        "scaled_dot_product_attention"
    ),
}
_PROMOTE = {
    "cpu": _names("cat index_copy stack"),
    "cuda": _names(
        "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
    ),
}
_COMPOSED: Mapping[str, Mapping[Policy, frozenset[str]]] = {
    "cpu": {
        "lower": _names("chain_matmul linalg_matmul linalg_multi_dot"),
        "fp32": _names("nll_loss_nd"),
        "inside": _names(
            "bilinear corrcoef cov einsum gru gru_cell inner linalg_matrix_power linalg_pinv lstm "
            "lstm_cell matrix_power pinverse rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell "
            "tensordot"
        ),
    },
    "cuda": {
        "lower": _names("conv1d.padding conv2d.padding conv3d.padding linalg_matmul"),
        "fp32": _names(
            "cross_entropy_loss linalg_norm nll_loss_nd square _upsample_bicubic2d_aa.vec "
            "_upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec "
            "_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec upsample_bicubic2d.vec "
            "upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec "
            "upsample_nearest2d.vec upsample_nearest3d.vec upsample_trilinear3d.vec"
        ),
        "promote": _names("inner"),
        "inside": _names(
            "corrcoef cov cumulative_trapezoid gru linalg_lstsq linalg_matrix_power linalg_pinv "
            "lstm matrix_power pairwise_distance pinverse rnn_relu rnn_tanh sum_to_size trapezoid "
            "trapz"
        ),
    },
}


@functools.cache
def policy(target: internals.OpOverload, device_type: str) -> Policy | None:
    """Return the policy of autocast on `device_type` for `target`; None without conversion."""
    if device_type not in _KEYS:
        return None
    name = target._schema.name
    full = f"{name}.{target._schema.overload_name}".removesuffix(".")
    if not internals._dispatch_has_kernel(full):
        return None  # The dispatcher does not know overloads on plain numbers.
    if internals._dispatch_has_kernel_for_dispatch_key(full, _KEYS[device_type]):
        if name in _LOWER[device_type]:
            return "lower"
        return "promote" if name in _PROMOTE[device_type] else "fp32"
    if any(argument.is_out for argument in target._schema.arguments):
        return None
    for result, names in _COMPOSED[device_type].items():
        if name in names or full in names:
            return result
    return None
