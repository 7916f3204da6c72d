"""Prices of limits are begun at what choices alone would have them, and end where the bound is
highest.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from qsync_fx.allocator.milp.lagrangian_relaxation import (
    Coupling,
    IndependentChoices,
    LagrangianRelaxation,
)
from qsync_fx.allocator.milp.linear_program import LinearProgram
from tests.support.tiers import chosen

EXAMPLES = chosen([15], [100])[0]


def drawn(seed: int, count: int) -> tuple[LinearProgram, list[list[int]], list[float]]:
    """Returns a program of choices, and what each of them weighs."""
    draw = random.Random(seed)
    program, weights = LinearProgram(), []
    groups = []
    for _ in range(count):
        ways = draw.choice((1, 2, 3, 5))
        groups.append(
            [
                program.variable(draw.choice((0.0, draw.lognormvariate(0, 2))), full=True)
                for _ in range(ways)
            ]
        )
        weights += [draw.choice((1.0, draw.lognormvariate(0, 1))) for _ in range(ways)]
        program.row(dict.fromkeys(groups[-1], 1.0), 1.0, 1.0)
    return program, groups, weights


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 10**6), price=st.floats(1e-3, 1e3))
def test_curve_gives_the_best_choices_at_each_price(seed: int, price: float) -> None:
    program, groups, weights = drawn(seed, 8)
    factors, costs = np.array(weights), np.array(program.costs)
    alone = IndependentChoices(groups, costs)
    curve = alone.curve(factors)
    before = float(factors @ alone.values(len(costs)))
    now = alone.values(len(costs), price * factors)
    assert now.sum() == len(groups)
    assert curve.won(price) == pytest.approx(before - float(factors @ now), abs=1e-9)
    assert (np.diff(curve.prices) >= 0).all()
    if curve.won(price) > 0:
        assert curve.price(curve.won(price) * (1 - 1e-9)) <= price


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
def test_few_programs_are_solved_to_the_relaxed_bound(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, groups, weights = drawn(seed, 400)
    factors = np.array(weights)
    least = sum(min(weights[at] for at in group) for group in groups)
    most = float(factors @ IndependentChoices(groups, np.array(program.costs)).values(len(weights)))
    limit = least + share * (most - least)
    # The first of two running limits follows from the second, which is the one that counts.
    half = len(weights) // 2
    parts = [
        dict(enumerate(weights[:half])),
        {half + at: weight for at, weight in enumerate(weights[half:])},
    ]
    relaxing = LagrangianRelaxation(
        program, [Coupling(parts, [limit, limit], running=True)], groups, 60.0
    )
    runs: list[None] = []
    run = LagrangianRelaxation._run

    def counted(self: LagrangianRelaxation) -> object:
        runs.append(None)
        return run(self)

    monkeypatch.setattr(LagrangianRelaxation, "_run", counted)
    found = relaxing.solved(1e-4)
    assert found is not None
    assert found.values is not None
    assert float(factors @ found.values) <= limit * (1 + 1e-6)
    assert len(runs) <= 8, (
        "choices are all that there is: the price is known from the start, but for a step"
    )
    program.row(dict(enumerate(weights)), most=limit)
    relaxed = program.solve(0.0, 60.0, relaxed=True)
    assert relaxing.bound >= relaxed.bound * (1 - 1e-6)
    assert found.bound <= found.objective
    whole = program.solve(1e-5, 60.0)
    assert found.objective <= whole.objective * (1 + 1.1e-4)
    assert relaxing.bound <= whole.objective * (1 + 1e-6)


def test_limit_between_choices_may_cost_no_time() -> None:
    program = LinearProgram()
    group = [program.variable(1.0, full=True), program.variable(2.0, full=True)]
    program.row(dict.fromkeys(group, 1.0), 1.0, 1.0)
    # What follows from the first choice costs more than the second.
    beside = program.variable(5.0)
    program.row({group[0]: 1.0, beside: -1.0}, most=0.0)
    limit = Coupling([{group[0]: 3.0, group[1]: 1.0}], [2.0], running=False)
    found = LagrangianRelaxation(program, [limit], [group], 60.0).solved(1e-4)
    assert found is not None
    assert (found.objective, found.bound) == pytest.approx((2.0, 2.0))


def test_a_limit_that_choices_alone_keep_may_count() -> None:
    program = LinearProgram()
    group = [program.variable(1.0, full=True), program.variable(2.0, full=True)]
    program.row(dict.fromkeys(group, 1.0), 1.0, 1.0)
    beside = program.variable()
    program.row({group[0]: 1.0, beside: -1.0}, most=0.0)
    limit = Coupling([{group[0]: 1.0, group[1]: 1.0, beside: 3.0}], [2.0], running=False)
    found = LagrangianRelaxation(program, [limit], [group], 60.0).solved(1e-4)
    assert found is not None
    assert (found.objective, found.bound) == pytest.approx((2.0, 2.0))
