"""Operators that the table allows in narrow floats: their results equal FP32 results up
to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from qsync_fx.graph.fx_utils import filled
from qsync_fx.ops import Kind, OperatorRow, row_for
from tests.support import tiers
from tests.support.computing.operator_samples import Call, calls

NARROW = (torch.bfloat16, torch.float16)


def is_fp32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def converted(
    call: Call, row: OperatorRow, convert: Callable[[torch.Tensor], torch.Tensor]
) -> Call:
    """Return the call with converted inputs, as passes convert them: operands of an adjustable
    operator, all inputs of a dependent operator.
    """

    def fresh(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def chosen(value: Any) -> Any:
        return convert(value) if is_fp32(value) else fresh(value)

    everything = row.kind is Kind.DEPENDENT
    values = tuple(filled(call.target, call.args, call.kwargs).values())
    positions = range(len(call.args)) if everything else row.converted(values)
    args = tuple(tree_map(chosen if i in positions else fresh, v) for i, v in enumerate(call.args))
    return Call(call.target, args, tree_map(chosen if everything else fresh, call.kwargs))


def forward_and_backward(
    call: Call, row: OperatorRow
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the floating-point outputs, and the gradients of tensors that passes convert."""
    torch.manual_seed(0)
    mutable = call.target._schema.is_mutable
    values = tuple(filled(call.target, call.args, call.kwargs).values())
    positions = row.converted(values) if row.kind is Kind.ADJUSTABLE else range(len(call.args))
    inputs = [
        v
        for i in positions
        if i < len(call.args)
        for v in tree_leaves(call.args[i])
        if _differentiable(v)
    ]
    if not mutable:
        for value in inputs:
            value.requires_grad_()
    with torch.enable_grad():
        result = call.target(*call.args, **call.kwargs)
    outputs = [v for v in tree_leaves(result) if _differentiable(v)]
    carrying = [v for v in outputs if v.requires_grad]
    if row.kind is Kind.ADJUSTABLE:
        del carrying[1:]  # Statistics of a norm, which are not differentiated.
    if not carrying or mutable:
        return outputs, []
    # Different values, since softmax and norms have zero gradients for equal ones; positive, so
    # that few sums cancel; 3 bits, exact in every dtype.
    seeds = [torch.randint(4, 8, v.shape).to(v.dtype) / 8 for v in carrying]
    return outputs, list(torch.autograd.grad(carrying, inputs, seeds, allow_unused=True))


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def steps_apart(
    first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype, least: float
) -> float:
    """Return the largest difference of finite values, in steps of the dtype at the largest value
    (or at `least`).
    """
    first, second = first.detach().float(), second.detach().float()
    finite = second.isfinite()
    if (finite & ~first.isfinite()).any():
        return math.inf
    largest = max(float(second[finite].abs().max()) if finite.any() else 0.0, least)
    if not largest or not finite.any():
        return 0.0
    return float((first - second)[finite].abs().max()) / largest / torch.finfo(dtype).eps


# Autograd's messages for operators without a derivative, and for arguments that are random numbers
# rather than data.
NO_BACKWARD = ("derivative for", "not differentiable")
# Limits in steps at the largest value, for outputs and gradients. Gradients of a quotient are
# products of several rounded values, gradients of attention products of three. The CPU accumulates
# a product of two vectors in their dtype.
STEPS = 3.0
LOOSE = {
    "aten::addcdiv": 8.0,
    "aten::addcmul": 4.0,
    "aten::div": 4.0,
    "aten::divide": 4.0,
    "aten::inner": 16.0,
    "aten::scaled_dot_product_attention": 4.0,
    "aten::true_divide": 4.0,
}
# The gradient of a softmax is a difference of incoming gradients, near zero if it is saturated.
# Errors are relative to 1, the magnitude of its outputs and incoming gradients.
NEAR_ONE = frozenset({"aten::softmax", "aten::_softmax", "aten::_safe_softmax"})


@tiers.ALL
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_operators_support_narrow_floats(dtype: torch.dtype) -> None:
    """On torch's samples, every adjustable and dependent operator returns the FP32 result of its
    rounded inputs, up to rounding.
    """
    wrong: set[str] = set()
    kinds: dict[Kind, set[str]] = {kind: set() for kind in Kind}
    for call in calls(2):
        row = row_for(call.target)
        if row is None or row.kind is Kind.FIXED:
            continue
        name = call.target._schema.name.removesuffix("_")
        narrow = converted(call, row, lambda v: v.to(dtype))
        exact = converted(call, row, lambda v: v.to(dtype).float())
        try:
            actual = forward_and_backward(narrow, row)
        except RuntimeError as error:
            if not any(text in str(error) for text in NO_BACKWARD):
                wrong.add(f"{call.target}: {error}")
            continue
        expected = forward_and_backward(exact, row)
        kinds[row.kind].add(name)
        pairs = [
            *zip(actual[0], expected[0], strict=True),
            *zip(actual[1], expected[1], strict=True),
        ]
        worst = max(
            (
                steps_apart(a, b, dtype, float(name in NEAR_ONE))
                for a, b in pairs
                if a is not None and b is not None
            ),
            default=0.0,
        )
        if worst > LOOSE.get(name, STEPS):
            wrong.add(f"{call.target}: off by {worst:.1f} steps of {dtype}")
    assert not wrong, "\n".join(sorted(wrong))
    assert len(kinds[Kind.ADJUSTABLE]) > 30
    assert len(kinds[Kind.DEPENDENT]) > 150
