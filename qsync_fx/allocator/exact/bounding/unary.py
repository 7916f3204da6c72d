"""Small numbers as linear expressions: of each number up to `TOP`, whether there are so many.

A sum reaches k only where, however k - 1 is shared out among its parts, one of them is above its share. These rows have no other factors
than 1, so that a relaxed program is near to the whole one, where one variable that counts would be far from it: with 12 of 13 it would be
nearly as free as with all.

Invariant: at whole choices a count may be as large as the number that it stands for, and no larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from qsync_fx.allocator.exact.linear.program import ONE, Expression, Program, constant, total
from qsync_fx.predictor.memory.backward import READS

TOP: Final = READS + 1
"""More than a compiler reads at once: what is more than that need not be told apart."""

Count = Sequence[Expression]
"""Whether there is one or more, two or more, and so on up to `TOP`."""


def exactly(number: int) -> Count:
    return _EXACTLY[min(number, TOP)]


_EXACTLY: Final = [tuple(ONE if at < number else {} for at in range(TOP)) for number in range(TOP + 1)]


def where(condition: Expression) -> Count:
    """Returns one where a condition is 1, and none elsewhere."""
    return (condition, *exactly(0)[1:])


def one_or_more(count: Count) -> Count:
    return (ONE, *count[1:])


def where_so(condition: Expression, count: Count) -> Count:
    """Returns what is a count where a condition is 1, and more than anything elsewhere; for `least`, as it may be above 1."""
    known = constant(condition)
    if known is not None:
        return count if known == 1 else exactly(TOP)
    return [one if constant(one) == 1 else total((1.0, one), (1.0, ONE), (-1.0, condition)) for one in count]


def least(program: Program, several: Sequence[Count]) -> Count:
    """Returns the least of several."""
    return [program.at_most(bounds) for bounds in zip(*several, strict=True)]


def added(program: Program, several: Iterable[Count]) -> Count:
    """Returns the sum of several."""
    found = exactly(0)
    for count in several:
        sure = _sure(found) + _sure(count)
        first, second = _free(found), _free(count)
        rest: Sequence[Expression] = first or second
        if first and second:
            size = min(len(first) + len(second), TOP - sure)
            rest = [_reached(program, first, second, many) for many in range(1, size + 1)]
        found = [*exactly(sure)[: min(sure, TOP)], *rest, *exactly(0)][:TOP]
    return found


def _reached(program: Program, first: Count, second: Count, many: int) -> Expression:
    """Returns whether there are so many of both together."""
    bounds: list[Expression] = []
    for share in range(max(0, many - 1 - len(second)), min(many - 1, len(first)) + 1):
        other = many - 1 - share
        above = [first[share]] if share < len(first) else []
        above += [second[other]] if other < len(second) else []
        bounds.append(above[0] if len(above) == 1 else total(*((1.0, one) for one in above)))
    return program.at_most(bounds)


def _sure(count: Count) -> int:
    """Returns how many there are in any case."""
    return next((at for at, one in enumerate(count) if constant(one) != 1), TOP)


def _free(count: Count) -> Count:
    """Returns whether there are one, two and so on beyond that, up to the most that there may be."""
    end = next((at + 1 for at in reversed(range(TOP)) if constant(count[at]) != 0), 0)
    return count[_sure(count) : end]
