"""Which random streams belong to whom: the one place that lays them out.

A stream is a number of 32 bits. A graph hands out those below `GRADIENTS`, one for each cast and each lowered operator, and those from
there to `RESULT` for what rounds gradients alone, and then those for dropout. The backward pass of a lowered operator draws from its own
stream plus a place of the backward pass, plus `RESULT` for what it gives out.

Invariant: no two sums are equal, as every term has bits of its own; whoever takes more than there are is told.
"""

from __future__ import annotations

from typing import Final

GRADIENTS: Final = 1 << 28
"""The first stream of what the option "gradient_rounding" rounds."""

RESULT: Final = 1 << 29
"""Added for the results of a backward pass, which are rounded after what it reads; all that graphs hand out for roundings lies below."""

DROPOUT: Final = RESULT
"""The first stream of what the option "fast_dropout" drops: no rounding has this bit without a place of the backward pass."""

_BACKWARD: Final = 1 << 30
SHARED: Final = _BACKWARD
"""Added for an incoming gradient that both products of a backward pass read."""

BACKWARD: Final = {"shared": SHARED, "activation": 2 * _BACKWARD, "weight": 3 * _BACKWARD}
"""Added in a backward pass, by the operand whose gradient a rounding is for."""


class Streams:
    """Hands out the numbers from `first` to `end` that tell the roundings of a graph and of its bodies apart; no two are equal."""

    def __init__(self, first: int = 0, end: int = GRADIENTS) -> None:
        self._next, self._end = first, end

    def take(self) -> int:
        if self._next == self._end:
            raise OverflowError(f"a graph has no more than {self._end} streams of random numbers")
        self._next += 1
        return self._next - 1
