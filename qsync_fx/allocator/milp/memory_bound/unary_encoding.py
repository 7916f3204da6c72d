"""Small counts as linear expressions, in unary encoding up to `TOP`.

A sum of counts reaches k only if, for each split of k - 1 into shares, one of the counts exceeds
its share. These rows have only unit factors, so that the LP relaxation is tight. With a single
counting variable it would be loose: 12 of 13 would be almost as free as 13.

Invariant: with integer choices, a count can be as large as the number it represents, but not
larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from qsync_fx.allocator.milp.linear_program import ONE, Expression, LinearProgram, constant, total
from qsync_fx.predictor.memory.backward import READS

TOP: Final = READS + 1
"""Limit of counts: more than `READS`, the most buffers that a fused kernel reads."""


@dataclass(frozen=True)
class Count:
    """Number in unary encoding.

    Attributes:
        base: constant part.
        indicators: indicators that the number is at least `base` + 1, `base` + 2, and so on.
    """

    base: int
    indicators: Sequence[Expression] = ()

    def reaches(self, many: int) -> Expression:
        """Return the indicator that the number is at least `many`, for `many` from 1."""
        if many <= self.base:
            return ONE
        return (
            self.indicators[many - self.base - 1]
            if many <= self.base + len(self.indicators)
            else {}
        )


def exactly(number: int) -> Count:
    return Count(min(number, TOP))


def where(condition: Expression) -> Count:
    """Return a count that is 1 where a condition is 1, else 0."""
    return _count(0, [condition])


def one_or_more(count: Count) -> Count:
    return count if count.base else Count(1, count.indicators[1:])


def where_so(condition: Expression, count: Count) -> Count:
    """Return a count that applies where a condition is 1, and is unlimited elsewhere.

    Its indicators can exceed 1, so that it is valid as an argument of `least` only.
    """
    available = constant(condition)
    if available is not None:
        return count if available == 1 else exactly(TOP)
    rest = range(count.base + 1, TOP + 1)
    return Count(
        count.base,
        [total((1.0, count.reaches(many)), (1.0, ONE), (-1.0, condition)) for many in rest],
    )


def least(program: LinearProgram, several: Sequence[Count]) -> Count:
    """Return the minimum of several counts."""
    base, top = (
        min(item.base for item in several),
        min(item.base + len(item.indicators) for item in several),
    )
    rest = range(base + 1, top + 1)
    return _count(
        base, [program.at_most([item.reaches(many) for item in several]) for many in rest]
    )


def added(program: LinearProgram, several: Iterable[Count]) -> Count:
    """Return the sum of several counts."""
    result = Count(0)
    for count in several:
        base = result.base + count.base
        if base >= TOP:
            return exactly(TOP)
        rest = result.indicators or count.indicators
        if result.indicators and count.indicators:
            size = min(len(result.indicators) + len(count.indicators), TOP - base)
            rest = [
                _reached(program, result.indicators, count.indicators, many)
                for many in range(1, size + 1)
            ]
        result = _count(base, rest)
    return result


def _reached(
    program: LinearProgram, first: Sequence[Expression], second: Sequence[Expression], many: int
) -> Expression:
    """Return the indicator that the sum of two counts reaches a number."""
    bounds: list[Expression] = []
    for share in range(max(0, many - 1 - len(second)), min(many - 1, len(first)) + 1):
        other = many - 1 - share
        above = [first[share]] if share < len(first) else []
        above += [second[other]] if other < len(second) else []
        bounds.append(above[0] if len(above) == 1 else total(*((1.0, item) for item in above)))
    return program.at_most(bounds)


def _count(base: int, rest: Sequence[Expression]) -> Count:
    """Return a count with constant indicators folded into its constant part."""
    available = [constant(item) for item in rest]
    first = next((index for index, size in enumerate(available) if size != 1), len(available))
    end = next((index for index, size in enumerate(available) if size == 0), len(available))
    return Count(min(base + first, TOP), rest[first : max(first, min(end, TOP - base))])
