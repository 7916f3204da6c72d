"""The relaxed program of many operators, and whole choices that are near to it.

What couples operators that are far from one another are limits: of seconds until each bucket is sent, and of what is held. Without them a
program falls into small parts, and a solver is through it in a moment. So a limit enters it first as a price of what it limits, which is
raised and lowered until the limit is just kept; then as a row, to which the solver comes from there in a few steps; and only once it is
missed. Which limit counts, and about at what price, is known of the choices alone (`alone`): the first program that is solved is nearly the
last. Of the relaxed solution few choices are between formats. These, and those that nearly are, are chosen anew by a program in which all
others are given.

Invariant: no solution of the whole program is below the bound.

Choices by what each costs and takes itself: what a limit's price is about, before any program is solved.

At a price of what a limit limits, each choice alone is made by a comparison. What is left out is what else follows from choices, such as
conversions between them: so a price that is found so is one to begin at, and nothing is concluded from it.

Invariant: by what choices cost and take themselves, `TradeoffCurve.won` at a price is what `IndependentChoices.values` win at it.

A program with whole choices is solved where its relaxation leaves a choice.

The relaxed program is solved in a moment, and few of its choices are between formats. What it costs at least to make another one whole that
the relaxation has made is its reduced cost: a solution that does is no better than the relaxed one by that much more. So those are made as
the relaxation made them that cost more than all others, what is left is solved, and what that finds says which of the rest cannot be better
either: G. Dantzig, R. Fulkerson and S. Johnson, "Solution of a Large-Scale Traveling-Salesman Problem", 1954. Where that leaves most
choices open, the program is solved as it is, from the best that was found.

Invariant: no solution of the program is below the bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import highspy
import numpy as np

from qsync_fx.allocator.milp.linear_program import (
    CONSTANT,
    INFINITY,
    Expression,
    LinearProgram,
    LpSolution,
)
from qsync_fx.predictor.replayer.device_timeline import Array


@dataclass(frozen=True)
class TradeoffCurve:
    """What choices win of a limit at a price, were there nothing but choices.

    Attributes:
        prices: from which on each step is worth it, from the least on.
        wins: by all steps up to each.
    """

    prices: Array
    wins: Array

    def won(self, price: float) -> float:
        """Returns what is won at a price."""
        steps = int(np.searchsorted(self.prices, price, side="right"))
        return float(self.wins[steps - 1]) if steps else 0.0

    def price(self, won: float) -> float:
        """Returns the price at which so much is won, or as much as can be."""
        if not len(self.prices):
            return 0.0
        return float(self.prices[min(int(np.searchsorted(self.wins, won)), len(self.prices) - 1)])


class IndependentChoices:
    """Choices by what they cost and take themselves, whatever else follows from them.

    Args:
        groups: the variables of each choice.
        costs: of all variables.
    """

    def __init__(self, groups: Sequence[Sequence[int]], costs: Array) -> None:
        most = max(map(len, groups), default=1)
        # What is not there is what is there already, once more.
        self._groups = np.array(
            [[*group, *[group[0]] * (most - len(group))] for group in groups], np.int64
        ).reshape(-1, most)
        self._costs = costs[self._groups]
        self._each = np.arange(len(self._groups))

    def values(self, count: int, more: Array | None = None) -> Array:
        """Returns values of all variables at which each choice costs least, with something more on each variable."""
        costs = self._costs if more is None else self._costs + more[self._groups]
        result: Array = np.zeros(count)
        result[self._groups[self._each, costs.argmin(axis=1)]] = 1.0
        return result

    def curve(self, factors: Array) -> TradeoffCurve:
        """Returns what choices win of a row: the steps along the lower hull of what each costs and takes."""
        weights = factors[self._groups]
        index = self._costs.argmin(axis=1)
        prices, wins = [np.zeros(0)], [np.zeros(0)]
        for _ in range(weights.shape[1] - 1):
            won = weights[self._each, index][:, None] - weights
            dearer = self._costs - self._costs[self._each, index][:, None]
            slopes = np.where(won > 0, dearer / np.where(won > 0, won, 1.0), INFINITY)
            to = slopes.argmin(axis=1)
            slope, step = slopes[self._each, to], won[self._each, to]
            existing = slope < INFINITY
            prices.append(slope[existing])
            wins.append(step[existing])
            index = np.where(existing, to, index)
        slope = np.concatenate(prices)
        order = np.argsort(slope, kind="stable")
        return TradeoffCurve(slope[order], np.cumsum(np.concatenate(wins)[order]))


_NEAR: Final = 1e-3
"""How near to one another two prices of a limit are, of them, before it becomes a row."""
_CLOSE: Final = 1e-4
"""By how much, of it, the bound may still rise with the price when a limit becomes a row."""
_BEYOND: Final = 1.25
"""How far a price goes beyond the one that choices alone would have, as powers."""
_FARTHEST: Final = math.log(16)
"""As how many times as much, or as little, a price is tried next."""
_LEAST: Final = 1e-9
"""A price below which a limit costs nothing; beyond its inverse nothing keeps it."""
_SWITCHES: Final = 6
"""Limits that a price is sought for, one at a time."""
_FREE: Final = 256
"""Choices that are made anew at first."""
_MISSED: Final = 1e-6
"""By how much a row may be missed, of thousandths."""


class Coupling:
    """Rows that couple what is far apart: of each of `parts`, or, where they are `running`, of all parts up to it."""

    def __init__(self, parts: Sequence[Expression], most: Sequence[float], running: bool) -> None:
        self.running, self.most = running, np.array(most)
        self._rows = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        variables = np.array([variable for part in parts for variable in part], np.int64)
        factors = np.array([factor for part in parts for factor in part.values()], np.float64)
        available = variables == CONSTANT
        self.constants = self._summed(
            np.bincount(self._rows[available], factors[available], len(parts))
        )
        self._rows, self.variables, self.factors = (
            self._rows[~available],
            variables[~available],
            factors[~available],
        )

    def __len__(self) -> int:
        return len(self.most)

    def beyond(self, values: Array) -> Array:
        """Returns by how much each is exceeded."""
        parts = np.bincount(self._rows, self.factors * values[self.variables], len(self))
        result: Array = self._summed(parts) + self.constants - self.most
        return result

    def row(self, index: int, count: int) -> tuple[Array, float]:
        """Returns the factors of all variables in a row, and what it is at most."""
        those = self._rows <= index if self.running else self._rows == index
        factors: Array = np.bincount(self.variables[those], self.factors[those], count)
        return factors, float(self.most[index] - self.constants[index])

    def _summed(self, parts: Array) -> Array:
        result: Array = np.cumsum(parts) if self.running else parts
        return result


@dataclass
class _Active:
    """A limit that the solver knows.

    Attributes:
        column: of what is left of it.
        factors, most: the row.
    """

    column: int
    factors: Array
    most: float


@dataclass(frozen=True)
class _Line:
    """A solution as prices of a limit see it: at another price it costs `cost` and that price times `over`."""

    price: float
    cost: float
    over: float


class LagrangianRelaxation:
    """
    Args:
        program: without limits.
        limits: of it.
        groups: for each choice, the variables of which one is to be 1.
        seconds: after which it is given up.
    """

    def __init__(
        self,
        program: LinearProgram,
        limits: Sequence[Coupling],
        groups: Sequence[Sequence[int]],
        seconds: float,
    ) -> None:
        self.program, self.limits, self.groups = program, limits, groups
        self.count = len(program.costs)
        self.costs = np.array(program.costs)
        self.bound = -INFINITY
        self._alone = IndependentChoices(groups, self.costs)
        self._until = time.monotonic() + seconds
        self._highs = program.highs(relaxed=True)
        self._active: dict[tuple[int, int], _Active] = {}

    def solved(self, gap: float) -> LpSolution | None:
        """Returns whole choices that are as near to the bound as the gap says, else the nearest; None where none were found."""
        values = self._relaxed()
        if values is None:
            return None
        margins = self._margins(values)
        free, best = _FREE, LpSolution(None, INFINITY, self.bound)
        while True:
            result = self._whole(values, margins, free, gap)
            if result is not None and (objective := float(self.costs @ result)) < best.objective:
                best = LpSolution(result, objective, min(self.bound, objective))
            if best.values is not None and best.objective - self.bound <= gap * abs(best.objective):
                return best
            if free >= len(self.groups) or self._late():
                return replace(best, stopped=True) if best.values is not None else None
            free *= 4

    def _late(self) -> bool:
        return time.monotonic() > self._until

    def _relaxed(self) -> Array | None:
        """Returns the relaxed solution; None where there is none, or no time."""
        values: Array | None = None
        tried: set[tuple[int, int]] = set()
        limit, price = self._guessed()
        if limit is None:
            if (values := self._run()) is None:
                return None
            limit = self._worst(values)
        while limit is not None and len(tried) < _SWITCHES and limit not in tried:
            tried.add(limit)
            values, price, met = self._priced(limit, price, tried)
            if values is None:
                return None
            if met:
                break
            limit = self._worst(values)
        # From prices to rows: what is left of a limit that has a price is nothing.
        for active in self._active.values():
            self._highs.changeColBounds(active.column, 0.0, 0.0)
        if self._active and (values := self._run()) is None:
            return None
        for active in self._active.values():
            self._highs.changeColCost(active.column, 0.0)
            self._highs.changeColBounds(active.column, 0.0, INFINITY)
        while True:
            if self._active and (values := self._run()) is None:
                return None
            assert values is not None
            self.bound = max(self.bound, float(self._highs.getInfo().objective_function_value))
            if (worst := self._worst(values)) is None:
                return values
            self._activate(worst, free=False)

    def _priced(
        self, limit: tuple[int, int], price: float, tried: set[tuple[int, int]]
    ) -> tuple[Array | None, float, bool]:
        """Finds the price at which a limit is just kept; returns the solution, the price, and whether no other limit comes first."""
        active = self._activate(limit, free=True)
        curve = self._alone.curve(active.factors)
        low: _Line | None = None
        high: _Line | None = None
        price, reach = max(price, _LEAST), _NEAR
        while True:
            self._highs.changeColCost(active.column, -price)
            if (values := self._run()) is None:
                return None, price, False
            line = self._line(active, price, values)
            self.bound = max(self.bound, line.cost + price * line.over)
            if line.over > 0:
                low = line
            else:
                high = line
                worst = self._worst(values)
                if worst is not None and worst not in tried:
                    # It is the other one that counts.
                    self._highs.changeColCost(active.column, 0.0)
                    del self._active[limit]
                    return values, price, False
            if low is not None and high is not None:
                # Where the lines of both solutions meet, the bound can be highest: it is no higher than they are there.
                meet = (high.cost - low.cost) / (low.over - high.over)
                inside = low.price * (1 + _NEAR) < meet < high.price * (1 - _NEAR)
                near = low.cost + meet * low.over - self.bound <= _CLOSE * abs(self.bound)
                near = near or high.price - low.price <= _NEAR * high.price
                price = meet if inside else (low.price * high.price) ** 0.5
            else:
                # As much further as the choices alone would have it, and somewhat more, so that it lies between two prices then.
                ratio = max(curve.price(curve.won(price) + line.over), _LEAST) / price
                step = _BEYOND * abs(math.log(ratio)) if (ratio > 1) == (line.over > 0) else 0.0
                step, reach, near = min(max(step, reach), _FARTHEST), 2 * reach, False
                price *= math.exp(step if line.over > 0 else -step)
            if near or not _LEAST < price < 1 / _LEAST or self._late():
                return values, line.price, True

    def _line(self, active: _Active, price: float, values: Array) -> _Line:
        return _Line(
            price, float(self.costs @ values), float(active.factors @ values) - active.most
        )

    def _guessed(self) -> tuple[tuple[int, int] | None, float]:
        """Returns the limit that counts, and about its price, were there nothing but choices; None where all limits are kept."""
        price, result = 0.0, self._worst(self._alone.values(self.count))
        tried: set[tuple[int, int]] = set()
        worst = result
        while worst is not None and worst not in tried and len(tried) < _SWITCHES:
            tried.add(worst)
            result = worst
            factors, _ = self.limits[worst[0]].row(worst[1], self.count)
            curve = self._alone.curve(factors)
            price = curve.price(
                float(self.limits[worst[0]].beyond(self._alone.values(self.count))[worst[1]])
            )
            worst = self._worst(self._alone.values(self.count, price * factors))
        return result, price

    def _activate(self, limit: tuple[int, int], free: bool) -> _Active:
        factors, most = self.limits[limit[0]].row(limit[1], self.count)
        existing = np.flatnonzero(factors).astype(np.int32)
        column = self._highs.getNumCol()
        nothing: tuple[Array, Array] = np.zeros(0, np.int32), np.zeros(0)
        self._highs.addCol(0.0, -INFINITY if free else 0.0, INFINITY, 0, *nothing)
        self._highs.addRow(
            most,
            most,
            len(existing) + 1,
            np.append(existing, column).astype(np.int32),
            np.append(factors[existing], 1.0),
        )
        self._active[limit] = _Active(column, factors, most)
        return self._active[limit]

    def _run(self) -> Array | None:
        self._highs.setOptionValue(
            "time_limit", max(self._until - time.monotonic(), 0.0) + self._highs.getRunTime()
        )
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        return np.array(self._highs.getSolution().col_value)[: self.count]

    def _worst(self, values: Array) -> tuple[int, int] | None:
        """Returns the limit that is missed most; None where none is."""
        result, most = None, _MISSED
        for number, limits in enumerate(self.limits):
            if len(limits) and (beyond := limits.beyond(values)).max() > most:
                result, most = (number, int(beyond.argmax())), float(beyond.max())
        return result

    def _margins(self, values: Array) -> list[tuple[float, int]]:
        """Returns choices by what another would cost, those that are not made first."""
        reduced = np.abs(np.array(self._highs.getSolution().col_dual))
        result = []
        for number, group in enumerate(self.groups):
            first = max(group, key=lambda variable: float(values[variable]))
            others = [float(reduced[variable]) for variable in group if variable != first]
            result.append(
                (0.0 if values[first] < 1 - _MISSED else min(others, default=INFINITY), number)
            )
        return sorted(result)

    def _whole(
        self, values: Array, margins: Sequence[tuple[float, int]], free: int, gap: float
    ) -> Array | None:
        """Returns a solution with some choices made anew, and all others as they are."""
        fixed = np.full(self.count, -1.0)
        for _, number in margins[free:]:
            group = self.groups[number]
            first = max(group, key=lambda variable: float(values[variable]))
            for variable in group:
                fixed[variable] = float(variable == first)
        while True:
            highs = self.program.highs(
                relaxed=False,
                fixed={int(index): float(fixed[index]) for index in np.flatnonzero(fixed >= 0)},
            )
            for active in self._active.values():
                existing = np.flatnonzero(active.factors).astype(np.int32)
                highs.addRow(
                    -INFINITY, active.most, len(existing), existing, active.factors[existing]
                )
            highs.setOptionValue("mip_rel_gap", gap / 4)
            highs.setOptionValue("objective_target", self.bound + gap / 2 * abs(self.bound))
            highs.setOptionValue("time_limit", max(self._until - time.monotonic(), 0.0))
            highs.run()
            if highs.getInfo().primal_solution_status != highspy.kSolutionStatusFeasible:
                return None
            result = np.array(highs.getSolution().col_value)
            if free >= len(self.groups):
                # All choices are made anew, and all rows are some of those that have to be kept.
                self.bound = max(self.bound, float(highs.getInfo().mip_dual_bound))
            if (worst := self._worst(result)) is None:
                return result
            if worst in self._active:
                return None
            factors, most = self.limits[worst[0]].row(worst[1], self.count)
            self._active[worst] = _Active(-1, factors, most)


_OPEN: Final = 40
"""Whole variables that are left open at first; all of the same reduced cost are."""
_MOST: Final = 0.75
"""The share of them beyond which nothing is gained."""
_SLACK: Final = 1e-6
"""By how much, of it, the relaxed objective is taken to be off."""


def solve(
    program: LinearProgram, gap: float, seconds: float, start: Mapping[int, float]
) -> LpSolution:
    """Solves a program; see `Program.solve`."""
    until = time.monotonic() + seconds
    full = program.choices
    relaxed = program.solve(gap, seconds, relaxed=True) if len(full) > _OPEN else None
    if relaxed is None or relaxed.values is None or relaxed.reduced is None:
        return program.solve(gap, seconds, start)
    values = relaxed.values[full]
    costs = np.where(relaxed.between(full), 0.0, relaxed.reduced[full])
    floor = relaxed.objective - _SLACK * abs(relaxed.objective)
    margin = float(np.partition(costs, _OPEN)[_OPEN])
    best, bound = LpSolution(None, INFINITY, floor), floor
    for share in (0.25, 0.95):
        inputs = costs > margin
        if inputs.mean() < 1 - _MOST:
            break
        fixed = dict(zip(full[inputs].tolist(), np.round(values[inputs]).tolist(), strict=True))
        result = program.solve(share * gap, until - time.monotonic(), fixed=fixed)
        if result.values is None:
            break
        if result.objective < best.objective:
            best = result
        bound = max(bound, min(result.bound, floor + float(costs[inputs].min(initial=INFINITY))))
        if best.objective - bound <= gap * abs(best.objective):
            return replace(best, bound=min(bound, best.objective), stopped=False)
        # What costs more than this is not better than what was found by more than half of the gap.
        margin = max(best.objective - floor - gap / 2 * abs(best.objective), 0.0)
    if best.values is not None:
        start = dict(zip(full.tolist(), best.values[full].tolist(), strict=True))
    result = program.solve(gap, until - time.monotonic(), start)
    bound = max(bound, result.bound) if result.values is not None else bound
    better = result if result.objective <= best.objective else best
    return replace(
        better,
        bound=min(bound, better.objective),
        infeasible=result.infeasible,
        stopped=result.stopped,
    )
