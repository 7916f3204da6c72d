"""What the memory of a step tells operators apart by, and sizes as numbers."""

from __future__ import annotations

from qsync_fx.errors import ProfileError
from qsync_fx.graph.algebra import Size
from qsync_fx.graph.dropout import VECTORS
from qsync_fx.predictor.model.value import Operator

HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
"""What Inductor has computed once, into memory, where several read it (on a CPU)."""
SIGMOIDS = ("silu",)
"""Activations whose gradient Inductor computes from a sigmoid that it reads several times."""
GATES = ("relu", "threshold")
GATHERS = ("embedding",)


def convolves(operator: Operator) -> bool:
    return "conv" in operator.row


def attends(operator: Operator) -> bool:
    """Whether it is attention as one product of query, key and value, all of whose gradients one kernel computes."""
    return "attention" in operator.row


def dear_gradient(operator: Operator) -> bool:
    """Whether its gradient is computed from something `HEAVY` that it reads several times."""
    return operator.row in SIGMOIDS or (operator.row == "gelu" and operator.method == "tanh")


def draws_alone(operator: Operator) -> bool:
    """Whether what it drops is drawn as a mask by one kernel, with no random numbers in memory."""
    return operator.method == VECTORS


def pools(operator: Operator) -> bool:
    """Whether it gives the largest of each window."""
    return operator.row.startswith("max_pool")


def whole(size: Size) -> int:
    """Returns a size as a number; raises `ProfileError` for an expression."""
    try:
        return int(size)
    except TypeError:
        raise ProfileError(
            f"memory is predicted for sizes that are numbers, and one is {size}",
            do="put numbers in their place, graph.at(batch=64), or explain the model with static shapes",
        ) from None
