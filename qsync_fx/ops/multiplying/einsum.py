"""`einsum`, the product whose shape is written in its first argument."""

from __future__ import annotations

import math
from typing import Any

from qsync_fx.ops.multiplying.contraction import einsum, labels
from qsync_fx.ops.multiplying.products import ACTIVATIONS
from qsync_fx.ops.row import Kind, OperatorRow


def contraction(args: tuple[Any, ...], output: Any) -> Any:
    """From left to right, as torch does without a path: a step multiplies once for each combination of labels it holds."""
    inputs, arrow, result = args[0].replace(" ", "").partition("->")
    terms = [labels(term, operand.dim()) for term, operand in zip(inputs.split(","), args[1], strict=True)]
    sizes: dict[str, Any] = {}
    for names, operand in zip(terms, args[1], strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            # One of the operands may be broadcast. A symbolic size is not 1: torch would have made a number of it.
            if name not in sizes or (isinstance(sizes[name], int) and sizes[name] == 1):
                sizes[name] = size
    every = [name for names in terms for name in names]
    kept = {name for name in every if _kept(name, result if arrow else None, every)}
    held, total = set(terms[0]), 0
    for position, names in enumerate(terms[1:], start=2):
        later = kept.union(*terms[position:])
        # What only one of the two has, and nobody needs later, is summed before they meet.
        shared = held & set(names)
        held = (held | set(names)) & (later | shared)
        # Without a sum it is a product value by value, of one operation each.
        total = total + (1 if held <= later else 2) * math.prod(sizes[name] for name in held)
        held &= later
    return total


def _kept(name: str, result: str | None, every: list[str]) -> bool:
    """Whether a label is one of the result's; without an arrow, those are what occurs once."""
    if result is None:
        return name.startswith(".") or every.count(name) == 1
    return "..." in result if name.startswith(".") else name in result


ROWS = (
    OperatorRow(
        "einsum",
        ("aten::einsum",),
        Kind.ADJUSTABLE,
        ACTIVATIONS,
        operands=(1,),
        contracts=einsum,
        products=True,
        flops=contraction,
    ),
)
