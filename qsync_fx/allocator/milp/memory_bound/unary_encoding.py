"""Small numbers as linear expressions: of each number up to `TOP`, whether there are so many.

A sum reaches k only where, however k - 1 is shared out among its parts, one of them is above its share. These rows have no other factors
than 1, so that a relaxed program is near to the whole one, where one variable that counts would be far from it: with 12 of 13 it would be
nearly as free as with all.

Invariant: at whole choices a count may be as large as the number that it stands for, and no larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.milp.linear_program import ONE, Expression, LinearProgram, constant, total
from qsync_fx.predictor.memory.backward import READS

TOP: Final = READS + 1
"""More than a compiler reads at once: what is more than that need not be told apart."""


@dataclass(frozen=True)
class Count:
    """
    Attributes:
        sure: how many there are in any case.
        free: whether there are one more, two more and so on; nothing beyond these.
    """

    sure: int
    free: Sequence[Expression] = ()

    def reaches(self, many: int) -> Expression:
        """Returns whether there are so many, of one or more."""
        if many <= self.sure:
            return ONE
        return self.free[many - self.sure - 1] if many <= self.sure + len(self.free) else {}


def exactly(number: int) -> Count:
    return Count(min(number, TOP))


def where(condition: Expression) -> Count:
    """Returns one where a condition is 1, and none elsewhere."""
    return _count(0, [condition])


def one_or_more(count: Count) -> Count:
    return count if count.sure else Count(1, count.free[1:])


def where_so(condition: Expression, count: Count) -> Count:
    """Returns what is a count where a condition is 1, and more than anything elsewhere; for `least`, as it may be above 1."""
    available = constant(condition)
    if available is not None:
        return count if available == 1 else exactly(TOP)
    rest = range(count.sure + 1, TOP + 1)
    return Count(
        count.sure,
        [total((1.0, count.reaches(many)), (1.0, ONE), (-1.0, condition)) for many in rest],
    )


def least(program: LinearProgram, several: Sequence[Count]) -> Count:
    """Returns the least of several."""
    sure, top = (
        min(item.sure for item in several),
        min(item.sure + len(item.free) for item in several),
    )
    rest = range(sure + 1, top + 1)
    return _count(
        sure, [program.at_most([item.reaches(many) for item in several]) for many in rest]
    )


def added(program: LinearProgram, several: Iterable[Count]) -> Count:
    """Returns the sum of several."""
    result = Count(0)
    for count in several:
        sure = result.sure + count.sure
        if sure >= TOP:
            return exactly(TOP)
        rest = result.free or count.free
        if result.free and count.free:
            size = min(len(result.free) + len(count.free), TOP - sure)
            rest = [_reached(program, result.free, count.free, many) for many in range(1, size + 1)]
        result = _count(sure, rest)
    return result


def _reached(
    program: LinearProgram, first: Sequence[Expression], second: Sequence[Expression], many: int
) -> Expression:
    """Returns whether there are so many of both together."""
    bounds: list[Expression] = []
    for share in range(max(0, many - 1 - len(second)), min(many - 1, len(first)) + 1):
        other = many - 1 - share
        above = [first[share]] if share < len(first) else []
        above += [second[other]] if other < len(second) else []
        bounds.append(above[0] if len(above) == 1 else total(*((1.0, item) for item in above)))
    return program.at_most(bounds)


def _count(sure: int, rest: Sequence[Expression]) -> Count:
    """Returns a count, of which it is known whether it reaches some numbers."""
    available = [constant(item) for item in rest]
    first = next((index for index, size in enumerate(available) if size != 1), len(available))
    end = next((index for index, size in enumerate(available) if size == 0), len(available))
    return Count(min(sure + first, TOP), rest[first : max(first, min(end, TOP - sure))])
