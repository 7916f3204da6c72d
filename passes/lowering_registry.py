"""Interface of the lowerings of adjustable ATen operators to `qsync::` operators.

Invariant: a lowering describes how to emit one call and makes no decision. The pass `lower` decides
which operators are lowered; `insert_casts` decides which casts they share.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.formats import Precision
from qsync_fx.graph import Context
from qsync_fx.rounding import Rounding


class Role(enum.StrEnum):
    """Role of a factor in a product with a weight."""

    ACTIVATION = "activation"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Operands:
    """Operands that the pass `lower` has prepared for one operator.

    Attributes:
        operands: for activation and weight: the original node, the quantized or rounded node, and
            the node of its scale (None if unscaled).
        seed: the node of the graph's seed, int64.
        stream: random stream of this operator, unique in the graph; 0 <= stream < 2**29.
        fmt: the name of the format.
    """

    operands: tuple[
        tuple[fx.Node, fx.Node, fx.Node | None], tuple[fx.Node, fx.Node, fx.Node | None]
    ]
    seed: fx.Node
    stream: int
    fmt: str
    rounding: Rounding
    out_dtype: torch.dtype


@dataclass(frozen=True)
class Lowering:
    """Lowering of one operator.

    Attributes:
        name: name of its row in `qsync_fx.ops`.
        emit: called with a node, insertion point before it; creates and returns the lowered node.
        keep: returns the operand's dimensions with one scale per index under per-channel scaling.
        refuses: called when values have the model's dtypes; returns why the operator cannot be
            lowered, or None.
        computed: called with the lowered node; returns a description of the implementation that
            computes the products, None if that is always torch.
        plain: called in training with a node in a plain format, insertion point before it; corrects
            the node if torch's gradients would be wrong. Returns the nodes that it created.
        separate: returns the operand's dimensions whose indices are separate matrices, such as
            experts. Each has its own scale under per-tensor scaling.
        slower: called with a format of fewer than 32 bits; returns why the next wider format (the
            row's `elsewhere` for a scaled format, else FP32) is as fast, or None.
    """

    name: str
    emit: Callable[[fx.Node, Operands], fx.Node]
    keep: Callable[[fx.Node, Role], list[int]]
    refuses: Callable[[fx.Node], str | None] = lambda node: None
    computed: Callable[[fx.Node, torch.device], object | None] = lambda node, device: None
    plain: Callable[[fx.Node], list[fx.Node]] = lambda node: []
    separate: Callable[[fx.Node, Role], list[int]] = lambda node, role: []
    slower: Callable[[fx.Node, Precision, Context], str | None] = lambda node, fmt, context: None


def dimensions(node: fx.Node) -> int:
    """Return the number of dimensions of a node's tensor."""
    value: torch.Tensor = node.meta["val"]
    return value.dim()


def extent(sizes: Iterable[Any]) -> int | None:
    """Return the product of sizes, by hints if symbolic; None if one is data-dependent."""
    result = 1
    for size in sizes:
        number = size.node.hint if isinstance(size, torch.SymInt) else size
        if number is None:
            return None
        result *= number
    return result
