"""`Charge`: what something takes, and where.

Invariant: at whole choices the expression is 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from qsync_fx.allocator.exact.linear.program import Expression
from qsync_fx.predictor.times import Seconds


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

    @classmethod
    def of(cls, owner: int, where: Expression, taken: Seconds) -> Charge:
        return cls(owner, where, taken.forward, taken.backward)
