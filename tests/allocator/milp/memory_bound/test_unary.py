"""Counts of a program are, at whole choices, as large as the numbers that they stand for, and no
larger.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from hypothesis import given, settings, strategies as st

from qsync_fx.allocator.milp.linear_program import CONSTANT, LinearProgram
from qsync_fx.allocator.milp.memory_bound.unary_encoding import (
    TOP,
    Count,
    added,
    exactly,
    least,
    one_or_more,
    where,
    where_so,
)
from tests.support.tiers import chosen

CONDITIONS = 3
Number = Callable[[Sequence[int]], int]


def drawn(
    draw: random.Random, program: LinearProgram, conditions: Sequence[int], deep: int
) -> tuple[Count, Number]:
    """Returns a count, and the number that it stands for where conditions hold or do not."""
    way = draw.randrange(2) if not deep else draw.randrange(2, 6)
    picked = draw.randrange(CONDITIONS)
    if way == 0:
        number = draw.choice((0, 1, 2, 5, TOP - 1))
        return exactly(number), lambda held: number
    if way == 1:
        return where({conditions[picked]: 1.0}), lambda held: held[picked]
    (first, one), (second, other) = (drawn(draw, program, conditions, deep - 1) for _ in range(2))
    if way == 2:
        return one_or_more(first), lambda held: max(1, one(held))
    if way == 3:
        unless = where_so({conditions[picked]: 1.0}, second)
        return least(program, [first, unless]), lambda held: min(
            one(held), other(held) if held[picked] else TOP
        )
    return added(program, [first, second]), lambda held: one(held) + other(held)


@settings(max_examples=chosen([20], [100])[0], deadline=None)
@given(seed=st.integers(0, 10**6), deep=st.integers(0, 4))
def test_unary_count_equals_its_value(seed: int, deep: int) -> None:
    program = LinearProgram()
    conditions = [program.variable(full=True) for _ in range(CONDITIONS)]
    count, number = drawn(random.Random(seed), program, conditions, deep)
    sure = 0.0
    for many in range(1, TOP + 1):
        for variable, factor in count.reaches(many).items():
            if variable == CONSTANT:
                sure += factor
            else:
                program.costs[variable] -= factor
    for held in itertools.product((0, 1), repeat=CONDITIONS):
        fixed = dict(zip(conditions, map(float, held), strict=True))
        found = program.solve(0.0, 60.0, relaxed=True, fixed=fixed)
        assert round(sure - found.objective, 6) == min(number(held), TOP)
        assert round(sure - program.solve(0.0, 60.0, fixed=fixed).objective, 6) == min(
            number(held), TOP
        )


def test_constant_counts_need_no_variable() -> None:
    program = LinearProgram()
    condition = program.variable(full=True)
    assert added(program, [exactly(2), where({condition: 1.0}), exactly(3)]) == Count(
        5, [{condition: 1.0}]
    )
    assert added(program, [exactly(TOP), where({condition: 1.0})]) == exactly(TOP)
    assert len(program.costs) == 1
