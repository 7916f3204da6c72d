"""Which attention is computed as two products with a softmax between them, in place of torch's fused kernel.

On the CPU that kernel is slow in BF16 where sequences are short: forward and backward together the products, compiled, took 0.25 to 0.64 of
its time for up to 512 tokens, and as long for 1,024 (`benchmarks/kernels/attention.py`). They keep the weights, which the kernel computes
again.

Invariant: who lowers attention and who foresees what it keeps ask the same function. It holds for what was measured alone: training in BF16
on a CPU with a unit for it, compiled by Inductor, without a mask and without dropout, of sizes that are known.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.devices import default_precision
from qsync_fx.devices.counted import ANY, capability
from qsync_fx.graph.values import format_of
from qsync_fx.options import Options

FUSED: Final = torch.ops.aten.scaled_dot_product_attention.default
_DROPOUT: Final = 4
"""Place of its chance among the arguments."""
MOST_TOKENS: Final = 512
"""Tokens of query and key up to which products are taken; of different lengths their mean (geometric) counts."""


def as_products(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], need: bool, device: torch.device, options: Options
) -> bool:
    """Returns whether a call is attention that is computed as products.

    Args:
        args, kwargs: of the call, tensors of the types that it computes in among them.
        need: whether a gradient flows back to an operand.
    """
    if target is not FUSED or not need or options.keep_less or options.inner != "inductor":
        return False
    query, key, value = args[:3]
    rest = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
    if any(rest.get(name) for name in ("dropout_p", "is_causal", "enable_gqa")) or rest.get("attn_mask") is not None:
        return False
    if device.type != "cpu" or capability(device) != ANY:
        return False
    # Of 16 bits, a CPU's default is what it has a unit for.
    fast = default_precision(device)
    if fast.bits != 16 or any(format_of(t) is not fast or t.dim() != 4 for t in (query, key, value)):
        return False
    lengths = query.shape[-2], key.shape[-2]
    return all(isinstance(length, int) for length in lengths) and lengths[0] * lengths[1] <= MOST_TOKENS**2


def without_dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of the call of the fused kernel that drops nothing."""
    drops = args[_DROPOUT : _DROPOUT + 1]
    rest = {name: value for name, value in kwargs.items() if name != "dropout_p"}
    return (*args[:_DROPOUT], *(0.0 for _ in drops), *args[_DROPOUT + 1 :]), rest


def products(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Computes attention as what it stands for: scores are rounded to the operands' type, and the softmax is FP32 inside."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1)
    # The same numbers as of a product in 16 bits. Of that Inductor makes the fused kernel again, where the batch is one sequence.
    scaled = (scores.float() * factor).to(scores.dtype)
    return torch.softmax(scaled, -1) @ value
