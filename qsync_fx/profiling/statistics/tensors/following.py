"""What the cascade makes narrow beside an operator: what follows it computes in the format that it gives out, and rounds anew.

A GELU behind a product in BF16 computes in BF16 and rounds its own result, and in the backward pass its gradient. What moves values or
chooses among them (a view, a ReLU, a pooling of maxima) has nothing to round: its result is on the grid as its input was.

Invariant: read off the notes under the plan that makes this operator alone narrow, so that what the cascade decides is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from qsync_fx.graph import Operator, PrecisionGraph, meta
from qsync_fx.graph.values import is_float
from qsync_fx.ops import Kind, Place
from qsync_fx.precision import Precision

CHOOSING: Final = frozenset(
    "relu threshold relu6 hardtanh clamp_min abs neg max_pool1d max_pool2d max_pool3d cat pad constant_pad_nd".split()
)
"""Dependent operators whose result is on the grid where their input is, beside those that move values."""

Narrow = Mapping[fx.Node, Operator]


@dataclass(frozen=True)
class Follower:
    """
    Attributes:
        operator: its id.
        fmt: what it computes in.
        leaves: whether its result is read in a wider format, so that the gradient of that is rounded on its way in.
    """

    operator: str
    fmt: Precision
    leaves: bool


def narrowed(operators: Sequence[Operator], before: Mapping[str, Precision | None]) -> Narrow:
    """Returns the dependent operators that compute in another format than `before`, of a graph's operators under a plan."""
    return {op.node: op for op in operators if op.kind is Kind.DEPENDENT and op.precision != before.get(str(op.id))}


def followers(narrow: Narrow) -> tuple[Follower, ...]:
    """Returns those that round something."""
    return tuple(
        Follower(str(op.id), op.precision, leaves(op.graph, node, narrow))
        for node, op in narrow.items()
        if op.precision is not None and op.precision.plain and not _hands_on(op)
    )


def leaves(graph: PrecisionGraph, node: fx.Node, narrow: Narrow) -> bool:
    """Whether something that is not narrow reads a result, or what those that have nothing to round make of it."""
    for user in node.users:
        if user in narrow:
            if _hands_on(narrow[user]) and leaves(graph, user, narrow):
                return True
        elif (
            user.op == "output"
            or user in meta.NOTE
            or meta.bodies(user)
            or (_holds_floats(graph.value(user)) and leaves(graph, user, narrow))
        ):
            return True
    return False


def floats(operator: Operator, at: int, given: Any) -> list[Place]:
    """Returns the places of the floating-point tensors in an argument."""
    value = operator.graph.value
    if isinstance(given, fx.Node):
        return [at] if is_float(value(given)) else []
    if isinstance(given, (list, tuple)):
        return [(at, item) for item, used in enumerate(given) if isinstance(used, fx.Node) and is_float(value(used))]
    return []


def _hands_on(operator: Operator) -> bool:
    """Whether nothing is rounded: what is read is on the grid, and so is the result. What is drawn cannot be computed again to see."""
    row, target = operator.row, operator.node.target
    if row is None or row.moves or row.name in CHOOSING or not isinstance(target, torch._ops.OpOverload):
        return True
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return drawn or target._schema.is_mutable or not is_float(operator.graph.value(operator.node))


def _holds_floats(value: Any) -> bool:
    return is_float(value) or (isinstance(value, (list, tuple)) and any(map(is_float, value)))
