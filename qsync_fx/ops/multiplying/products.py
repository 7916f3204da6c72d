"""Matrix products.

Only a product with a weight takes scaled formats. `linear`, and `addmm`, which adds a bias to one, are written for that; any other has one
where one of its factors is a parameter, which its row leaves to `classify`. Two activations the paper leaves unquantized, so their product
takes float formats only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from qsync_fx.ops.multiplying.contraction import (
    Contraction,
    contraction,
    grouped as groups,
    inner,
    linear,
    matmul,
    plus,
    tensordot,
)
from qsync_fx.ops.row import Flops, Kind, OperatorRow, dependent, fixed

WEIGHT = "a product of an activation and a weight: the plan chooses its precision"
ACTIVATIONS = "a product of two activations: the plan chooses among the float precisions"
PARAMETERS = "a product of two parameters: the plan chooses among the float precisions"
HELD = "a product with a buffer, or with what the model computes from its parameters: the plan chooses among the float precisions"
ODD = "a product of an activation and a weight, but not as a layer's: the plan chooses among the float precisions"


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


Contracts = Callable[[Sequence[Any]], Contraction | str]


def weighted(name: str, flops: Flops, scaled: tuple[int, int], bias: int, contracts: Contracts) -> OperatorRow:
    """A product of an activation and a weight, to which a bias may be added."""
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        WEIGHT,
        operands=(0, 1, 2),
        scaled=scaled,
        contracts=contracts,
        products=True,
        added=(bias,),
        flops=flops,
    )


def two(
    name: str,
    flops: Flops,
    contracts: Contracts | None,
    operands: tuple[int, ...] = (0, 1),
    bias: int | None = None,
    reason: str = ACTIVATIONS,
    unscaled: str = "",
) -> OperatorRow:
    """A product of two tensors, of which `contracts` may find one to be a weight."""
    return OperatorRow(
        name,
        (f"aten::{name}",),
        Kind.ADJUSTABLE,
        reason,
        operands=operands,
        contracts=contracts,
        unscaled=unscaled,
        products=True,
        added=() if bias is None else (bias,),
        flops=flops,
    )


def _letters(first: str, second: str, result: str) -> Contracts:
    return lambda args: contraction((first, second), result, (args[0], args[1]))


SEVERAL = "a product of several matrices: the plan chooses among the float precisions"

ROWS = (
    weighted("linear", last_dimension, (0, 1), 2, linear),
    weighted("addmm", added, (1, 2), 0, partial(plus, "mk", "kn", "mn")),
    two("mm", last_dimension, _letters("mk", "kn", "mn")),
    two("bmm", last_dimension, _letters("emk", "ekn", "emn")),
    two("matmul", last_dimension, matmul),
    two("linalg_matmul", last_dimension, matmul),
    two("mv", last_dimension, _letters("nk", "k", "n")),
    two("inner", last_dimension, inner),
    two("baddbmm", added, partial(plus, "emk", "ekn", "emn"), (0, 1, 2), 0),
    two("addmv", added, partial(plus, "nk", "k", "n"), (0, 1, 2), 0),
    two("addbmm", summed, partial(plus, "emk", "ekn", "mn"), (0, 1, 2), 0),
    two("_grouped_mm", grouped, groups, (0, 1, 3), 3),
    OperatorRow(
        "grouped_mm",
        ("transformers::grouped_mm_fallback",),
        Kind.ADJUSTABLE,
        ACTIVATIONS,
        operands=(0, 1),
        contracts=lambda args: groups(args[:2]),
        products=True,
        flops=grouped,
    ),
    two("chain_matmul", chain, None, (0,), reason=SEVERAL, unscaled="it multiplies several at once"),
    two("linalg_multi_dot", chain, None, (0,), reason=SEVERAL, unscaled="it multiplies several at once"),
    two("tensordot", tensor_dot, tensordot),
    two(
        "bilinear",
        bilinear,
        None,
        (0, 1, 2, 3),
        3,
        "a product of two activations and a weight: the plan chooses among the float precisions",
        "it multiplies its inputs by each other too",
    ),
    *dependent("an outer product works value by value, so it takes the precision of its inputs", "outer ger kron addr"),
    *fixed("a product of vectors that may cancel", "dot vdot linalg_vecdot cross linalg_cross"),
)
