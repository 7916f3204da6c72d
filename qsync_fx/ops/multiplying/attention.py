"""Attention as one operator.

Its two products are of activations, so it takes float formats only. Its softmax is FP32 inside.
"""

from __future__ import annotations

import math
from typing import Any

from qsync_fx.ops.row import Kind, OperatorRow

REASON = "attention multiplies activations by each other: the plan chooses among the float precisions"


def attention(args: tuple[Any, ...], output: Any) -> Any:
    """Query [..., Lq, E], key [..., Lk, E], value [..., Lk, Ev]: scores, then their product with the values.

    A causal mask halves neither: kernels differ in what they skip, and torch counts both whole too.
    """
    query, key, value = args[:3]
    return 2 * math.prod(output.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def attention_gradients(args: tuple[Any, ...], output: Any) -> Any:
    """Both gradients of both products; a fused kernel computes the scores once more, torch's plain one keeps them.

    On the CPU dropout is what the fused kernel does not take.
    """
    query, key, value, _, dropout = args[:5]
    pairs = 2 * math.prod(output.shape[:-1]) * key.shape[-2]
    again = 0 if query.device.type == "cpu" and dropout else query.shape[-1]
    return pairs * (2 * query.shape[-1] + 2 * value.shape[-1] + again)


ROWS = (
    OperatorRow(
        "scaled_dot_product_attention",
        ("aten::scaled_dot_product_attention",),
        Kind.ADJUSTABLE,
        REASON,
        operands=(0, 1, 2, 3),
        products=True,
        added=(3,),
        flops=attention,
        gradient_flops=attention_gradients,
    ),
)
