"""Fused operators of torch's transformer modules, written as the operators that they stand for.

Without gradients `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call one operator that is a whole layer. Invariant: what stands
here is what the modules do in training, operator for operator and module for module, so that a plan means the same in evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """Lays what is traced at the door of a child of the module that the fused operator belongs to."""
    meta = fx.traceback.get_current_meta()
    stack = meta.get("nn_module_stack")
    if not stack:
        yield
        return
    address, (path, kind) = list(stack.items())[-1]
    meta["nn_module_stack"] = {**stack, f"{address}.{name}": (f"{path}.{name}", kind)}
    try:
        yield
    finally:
        meta["nn_module_stack"] = stack


def _attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`nn.MultiheadAttention` of a batch with itself; the type of a mask is 0: `[L, L]`, 1: of keys, 2: `[N, heads, L, L]`."""
    turned = query.transpose(1, 0)
    out, weights = F.multi_head_attention_forward(
        turned, turned, turned, embed_dim, num_heads, qkv_weight, qkv_bias, None, None, False, 0.0, proj_weight, proj_bias,
        training=False, key_padding_mask=mask if mask_type == 1 else None, need_weights=need_weights,
        attn_mask=mask.flatten(0, 1) if mask is not None and mask_type == 2 else mask if mask_type == 0 else None,
        average_attn_weights=average_attn_weights,
    )  # fmt: skip
    return out.transpose(1, 0), weights


def _encoder_layer(
    src: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor, proj_weight: Tensor, proj_bias: Tensor,
    use_gelu: bool, norm_first: bool, eps: float, norm_weight_1: Tensor, norm_bias_1: Tensor, norm_weight_2: Tensor,
    norm_bias_2: Tensor, ffn_weight_1: Tensor, ffn_bias_1: Tensor, ffn_weight_2: Tensor, ffn_bias_2: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`nn.TransformerEncoderLayer`."""

    def attend(x: Tensor) -> Tensor:
        with _inside("self_attn"):
            return _attention(
                x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, mask_type=mask_type
            )[0]  # fmt: skip

    def feed(x: Tensor) -> Tensor:
        with _inside("linear1"):
            x = F.linear(x, ffn_weight_1, ffn_bias_1)
        x = F.gelu(x) if use_gelu else F.relu(x)
        with _inside("linear2"):
            return F.linear(x, ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, name: str, weight: Tensor, bias: Tensor) -> Tensor:
        with _inside(name):
            return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attend(norm(src, "norm1", norm_weight_1, norm_bias_1))
        return src + feed(norm(src, "norm2", norm_weight_2, norm_bias_2))
    src = norm(src + attend(src), "norm1", norm_weight_1, norm_bias_1)
    return norm(src + feed(src), "norm2", norm_weight_2, norm_bias_2)


UNFUSED: Mapping[Any, Callable[..., Any]] = {
    torch._transformer_encoder_layer_fwd: _encoder_layer,
    torch._native_multi_head_attention: _attention,
}
