"""Matrix products.

Only a product with a weight takes scaled formats: `linear`, and `addmm`, which adds a bias to one. The operands of the
others are mostly two activations, which the paper leaves unquantized, so they take float formats only.
"""

from __future__ import annotations

import math
from typing import Any

from qsync_fx.ops.row import Flops, Kind, OperatorRow, dependent, fixed

WEIGHT = "a product of an activation and a weight: the plan chooses its precision"
ACTIVATIONS = "a product of two activations: the plan chooses among the float precisions"


def last_dimension(args: tuple[Any, ...], output: Any) -> Any:
    """Operations of a product that contracts the last dimension of its first argument, if it has one (`inner`)."""
    return 2 * output.numel() * math.prod(args[0].shape[-1:])


def added(args: tuple[Any, ...], output: Any) -> Any:
    """The same where the first argument is what the product is added to."""
    return 2 * output.numel() * args[1].shape[-1]


def summed(args: tuple[Any, ...], output: Any) -> Any:
    """`addbmm(bias, [b, n, k], [b, k, m])` adds the `b` products up."""
    return 2 * output.numel() * args[1].shape[0] * args[1].shape[-1]


def grouped(args: tuple[Any, ...], output: Any) -> Any:
    """`_grouped_mm(a, b)`: whichever operand has two dimensions holds all groups one after the other."""
    first, second = args[:2]
    if first.dim() == second.dim() == 2:
        return 2 * first.numel() * second.shape[-1]
    return last_dimension(args, output)


def chain(args: tuple[Any, ...], output: Any) -> Any:
    """A product of several matrices, from left to right. torch picks the cheapest order: this is an upper bound."""
    first, *rest = args[0]
    # The first and the last may be vectors: a row, and a column.
    rows = first.shape[0] if first.dim() == 2 else 1
    inner, total = first.shape[-1], 0
    for matrix in rest:
        columns = matrix.shape[1] if matrix.dim() == 2 else 1
        total, inner = total + 2 * rows * inner * columns, columns
    return total


def bilinear(args: tuple[Any, ...], output: Any) -> Any:
    """`bilinear([..., i], [..., j], [o, i, j])`: a product with the weight, then one with the second input."""
    return 2 * output.numel() * args[2].shape[1] * (args[2].shape[2] + 1)


def tensor_dot(args: tuple[Any, ...], output: Any) -> Any:
    """`tensordot(a, b, dims_a, dims_b)` contracts `dims_a` of `a`."""
    return 2 * output.numel() * math.prod([args[0].shape[dimension] for dimension in args[2]])


def weighted(name: str, flops: Flops, scaled: tuple[int, int], bias: int) -> OperatorRow:
    """A product of an activation and a weight, to which a bias may be added."""
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        WEIGHT,
        operands=(0, 1, 2),
        scaled=scaled,
        products=True,
        added=(bias,),
        flops=flops,
    )


def two(name: str, flops: Flops, operands: tuple[int, ...] = (0, 1), bias: int | None = None) -> OperatorRow:
    """A product of two activations."""
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        ACTIVATIONS,
        operands=operands,
        products=True,
        added=() if bias is None else (bias,),
        flops=flops,
    )


ROWS = (
    weighted("linear", last_dimension, (0, 1), 2),
    weighted("addmm", added, (1, 2), 0),
    two("mm", last_dimension),
    two("bmm", last_dimension),
    two("matmul", last_dimension),
    two("linalg_matmul", last_dimension),
    two("mv", last_dimension),
    two("inner", last_dimension),
    two("baddbmm", added, (0, 1, 2), 0),
    two("addmv", added, (0, 1, 2), 0),
    two("addbmm", summed, (0, 1, 2), 0),
    two("_grouped_mm", grouped, (0, 1, 3), 3),
    OperatorRow(
        "grouped_mm",
        ("transformers::grouped_mm_fallback",),
        Kind.ADJUSTABLE,
        "a product of the tokens of every expert and its weight: the plan chooses among the float precisions",
        operands=(0, 1),
        products=True,
        flops=grouped,
    ),
    two("chain_matmul", chain, (0,)),
    two("linalg_multi_dot", chain, (0,)),
    two("tensordot", tensor_dot),
    two("bilinear", bilinear, (0, 1, 2, 3), 3),
    *dependent("an outer product works value by value, so it takes the precision of its inputs", "outer ger kron addr"),
    *fixed("a product of vectors that may cancel", "dot vdot linalg_vecdot cross linalg_cross"),
)
