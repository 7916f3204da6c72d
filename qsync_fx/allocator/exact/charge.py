"""`Charge`: what something takes, and where.

Invariant: at whole choices the expression is 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from qsync_fx.allocator.exact.program import Expression


@dataclass(frozen=True)
class Charge:
    """Time that is taken where an expression is 1.

    Attributes:
        owner: the place of the operator in whose stretch of the backward pass it is.
        where: the expression.
        forward, backward: seconds.
    """

    owner: int
    where: Expression
    forward: float
    backward: float
