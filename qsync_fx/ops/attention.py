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


ROWS = (
    OperatorRow(
        "scaled_dot_product_attention",
        ("aten::scaled_dot_product_attention",),
        Kind.ADJUSTABLE,
        REASON,
        operands=(0, 1, 2, 3),
        products=True,
        flops=attention,
    ),
)
