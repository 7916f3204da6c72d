"""`qsync::gate`: a gradient, but zero where a byte says so.

Why an operator: written with a bool, the bool is what a partitioner of joint graphs may keep for the backward pass; see
`qsync_fx.backend.inductor.relu`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_fx.backend.operators.library import define


def gate(gradient: Tensor, closed: Tensor) -> Tensor:
    """Returns 0 where `closed` is not 0, whatever the gradient is there, and the gradient elsewhere.

    Args:
        gradient: floating point, any shape.
        closed: int8, same shape.

    Returns:
        The shape and type of `gradient`.
    """
    found: Tensor = torch.ops.qsync.gate.default(gradient, closed)
    return found


def _select(gradient: Tensor, closed: Tensor) -> Tensor:
    return torch.where(closed != 0, 0.0, gradient)


define("gate(Tensor gradient, Tensor closed) -> Tensor", {"CompositeExplicitAutograd": _select}, _select)
