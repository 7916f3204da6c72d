"""A program with whole choices is solved where its relaxation leaves a choice.

The relaxed program is solved in a moment, and few of its choices are between formats. What it costs at least to make another one whole that
the relaxation has made is its reduced cost: a solution that does is no better than the relaxed one by that much more. So those are made as
the relaxation made them that cost more than all others, what is left is solved, and what that finds says which of the rest cannot be better
either: G. Dantzig, R. Fulkerson and S. Johnson, "Solution of a Large-Scale Traveling-Salesman Problem", 1954. Where that leaves most
choices open, the program is solved as it is, from the best that was found.

Invariant: no solution of the program is below the bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from qsync_fx.allocator.exact.linear.program import INFINITY, Program, Solved

_OPEN: Final = 40
"""Whole variables that are left open at first; all of the same reduced cost are."""
_MOST: Final = 0.75
"""The share of them beyond which nothing is gained."""
_SLACK: Final = 1e-6
"""By how much, of it, the relaxed objective is taken to be off."""


def solve(program: Program, gap: float, seconds: float, start: Mapping[int, float]) -> Solved:
    """Solves a program; see `Program.solve`."""
    until = time.monotonic() + seconds
    whole = program.choices
    relaxed = program.solve(gap, seconds, relaxed=True) if len(whole) > _OPEN else None
    if relaxed is None or relaxed.values is None or relaxed.reduced is None:
        return program.solve(gap, seconds, start)
    values = relaxed.values[whole]
    costs = np.where(relaxed.between(whole), 0.0, relaxed.reduced[whole])
    floor = relaxed.objective - _SLACK * abs(relaxed.objective)
    margin = float(np.partition(costs, _OPEN)[_OPEN])
    best, bound = Solved(None, INFINITY, floor), floor
    for share in (0.25, 0.95):
        given = costs > margin
        if given.mean() < 1 - _MOST:
            break
        fixed = dict(zip(whole[given].tolist(), np.round(values[given]).tolist(), strict=True))
        found = program.solve(share * gap, until - time.monotonic(), fixed=fixed)
        if found.values is None:
            break
        if found.objective < best.objective:
            best = found
        bound = max(bound, min(found.bound, floor + float(costs[given].min(initial=INFINITY))))
        if best.objective - bound <= gap * abs(best.objective):
            return replace(best, bound=min(bound, best.objective), stopped=False)
        # What costs more than this is not better than what was found by more than half of the gap.
        margin = max(best.objective - floor - gap / 2 * abs(best.objective), 0.0)
    if best.values is not None:
        start = dict(zip(whole.tolist(), best.values[whole].tolist(), strict=True))
    found = program.solve(gap, until - time.monotonic(), start)
    bound = max(bound, found.bound) if found.values is not None else bound
    better = found if found.objective <= best.objective else best
    return replace(better, bound=min(bound, better.objective), infeasible=found.infeasible, stopped=found.stopped)
