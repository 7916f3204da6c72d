"""How an adjustable ATen operator becomes a qsync operator.

Invariant: a lowering states how to write one call and decides nothing. Which operators are lowered, to what, and which casts they
share is the lower pass's business.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qsync_fx.formats import Precision
from qsync_fx.graph import Context
from qsync_fx.rounding import Rounding


class Role(enum.StrEnum):
    """What a factor is to a product with a weight."""

    ACTIVATION = "activation"
    WEIGHT = "weight"


@dataclass(frozen=True)
class Operands:
    """What the lower pass has prepared for one operator.

    Attributes:
        operands: for activation and weight: the original node, the quantized or rounded node, and its scale's (None if unscaled).
        seed: the node of the graph's seed, int64.
        stream: tells this operator from the others of the graph; at least 0 and below 2**29.
        fmt: the name of the format.
        rounding: "stochastic", "nearest" or "floor".
        out_dtype: type of the operator's output.
    """

    operands: tuple[
        tuple[fx.Node, fx.Node, fx.Node | None], tuple[fx.Node, fx.Node, fx.Node | None]
    ]
    seed: fx.Node
    stream: int
    fmt: str
    rounding: Rounding
    out_dtype: torch.dtype


def _as_it_is(node: fx.Node) -> list[fx.Node]:
    return []


def _none(node: fx.Node, role: Role) -> list[int]:
    return []


def _never(node: fx.Node) -> str | None:
    return None


def _as_fast(node: fx.Node, fmt: Precision, context: Context) -> str | None:
    return None


def _by_torch(node: fx.Node, device: torch.device) -> object | None:
    return None


@dataclass(frozen=True)
class Lowering:
    """The lowering of one operator.

    Attributes:
        name: name of its row in `qsync_fx.ops`.
        emit: called with the graph's insertion point before the node; creates and returns the node that computes what the node
            computes.
        keep: called with the node and a role; returns the dimensions of the operand in that role that have a scale per index where
            scales are per channel, `[]` where the operand has one scale even then.
        refuses: called with a node when its precision is decided; returns the reason why the operator cannot be lowered, None where it can.
            Types of values are then the model's.
        computed: called with the node that `emit` made and the device; returns what computes its products there, None where nothing but
            torch ever does.
        plain: called with a node that runs in a plain format, in training, with the insertion point before it; changes operands or target
            of the node where torch's own gradients would be wrong, and returns the nodes that it has created, in order.
        separate: called as `keep` is; returns the dimensions whose indices are matrices of their own, such as experts: each has a scale of
            its own where scales are per tensor.
        slower: called with a node, a format of fewer than 32 bits and the context of the graph; returns the reason why the next wider one
            is as fast there, a scaled one's row's `elsewhere`, or FP32; None where it is not.
    """

    name: str
    emit: Callable[[fx.Node, Operands], fx.Node]
    keep: Callable[[fx.Node, Role], list[int]]
    refuses: Callable[[fx.Node], str | None] = _never
    computed: Callable[[fx.Node, torch.device], object | None] = _by_torch
    plain: Callable[[fx.Node], list[fx.Node]] = _as_it_is
    separate: Callable[[fx.Node, Role], list[int]] = _none
    slower: Callable[[fx.Node, Precision, Context], str | None] = _as_fast


def dimensions(node: fx.Node) -> int:
    """Returns the number of dimensions of a node's tensor."""
    value: torch.Tensor = node.meta["val"]
    return value.dim()


def extent(sizes: Iterable[Any]) -> int | None:
    """Returns the product of sizes, of symbolic ones that of the example's; None where one depends on values."""
    numbers = [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
    return None if None in numbers else math.prod(numbers)
