"""Programs solved only for the choices that the relaxation leaves open, against brute force."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import assume, given, settings, strategies as st

from qsync_fx.allocator.milp import linear_program
from qsync_fx.allocator.milp.linear_program import LinearProgram, solve_with_fixing
from tests.support.tiers import chosen

EXAMPLES = chosen([15], [60])[0]


def drawn(seed: int, tight: float) -> tuple[LinearProgram, list[list[int]], list[float], float]:
    """Return a program with costs and weights of choices, its groups of choices, the weights, and
    the limit of the total weight.
    """
    draw = random.Random(seed)
    program = LinearProgram()
    groups = [
        [
            program.variable(draw.lognormvariate(0, 1) * scale, full=True)
            for scale in range(draw.choice((2, 3)))
        ]
        for _ in range(6)
    ]
    weights = [draw.choice((1.0, 2.0, draw.random())) for _ in program.costs]
    for group in groups:
        program.row(dict.fromkeys(group, 1.0), 1.0, 1.0)
    least = sum(min(weights[index] for index in group) for group in groups)
    limit = least + tight * (sum(weights) / 2 - least)
    program.row(dict(enumerate(weights)), most=limit)
    # Two first choices together have an extra cost.
    for group in groups[:3]:
        excess = program.variable(0.3)
        program.row({group[0]: 1.0, groups[3][0]: 1.0, excess: -1.0}, most=1.0)
    return program, groups, weights, limit


def least(
    program: LinearProgram, groups: list[list[int]], weights: list[float], limit: float
) -> float | None:
    """Return the least cost over all choices, or None if no choice meets the limit."""
    costs = [
        sum(program.costs[index] for index in picked)
        + 0.3 * sum(picked[n] == groups[n][0] and both for n in range(3))
        for picked in itertools.product(*groups)
        for both in (picked[3] == groups[3][0],)
        if sum(weights[index] for index in picked) <= limit
    ]
    return min(costs, default=None)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    tight=st.floats(-0.2, 1.0),
    opened=st.integers(0, 6),
    gap=st.sampled_from([0.0, 0.3]),
)
def test_relaxation_equals_brute_force(seed: int, tight: float, opened: int, gap: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_program, "_OPEN", opened)
        program, groups, weights, limit = drawn(seed, tight)
        best, less = (least(program, groups, weights, limit + slack) for slack in (1e-6, -1e-6))
        # HiGHS accepts a row that is violated by 1e-7: near a choice's weight, either result is
        # right.
        assume(best == less)
        solution = solve_with_fixing(program, gap, 60.0, {})
        assert not solution.stopped
        if best is None:
            assert solution.values is None and solution.infeasible
            return
        assert solution.values is not None and not solution.infeasible
        assert solution.bound <= best + 1e-6
        assert solution.objective >= best - 1e-6
        assert solution.objective - solution.bound <= gap * solution.objective + 1e-5
        assert not solution.between(program.choices).any()


def test_dominated_choices_are_evaluated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_program, "_OPEN", 3)
    program, *_ = drawn(3, 0.5)
    solve, fixings = program.solve, []
    monkeypatch.setattr(
        program,
        "solve",
        lambda *arguments, **options: (
            fixings.append(options.get("fixed")) or solve(*arguments, **options)
        ),
    )
    solution = solve_with_fixing(program, 0.1, 60.0, {})
    assert solution.values is not None
    relaxed, *cores = fixings
    assert relaxed is None and cores and all(fixed for fixed in cores), (
        "every program has fixed variables"
    )
