"""Solvers for large programs: Lagrangian relaxation, and reduced-cost fixing.

`LagrangianRelaxation` solves programs with thousands of operators: it prices the coupling limits,
solves the relaxation, and makes the remaining fractional choices in a small integer program.
`IndependentChoices` estimates the prices before any program is solved. `solve` fixes variables by
reduced cost and suits smaller programs.

Invariant: no solution of the integer program is below the bound.
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
    """Reduction of a limited quantity by independent choices, as a function of its price.

    Attributes:
        prices: ascending prices from which each step is worthwhile.
        wins: cumulative reduction up to each step.
    """

    prices: Array
    wins: Array

    def won(self, price: float) -> float:
        """Return the reduction at a price."""
        steps = int(np.searchsorted(self.prices, price, side="right"))
        return float(self.wins[steps - 1]) if steps else 0.0

    def price(self, won: float) -> float:
        """Return the price at which the reduction is reached, or the highest price."""
        if not len(self.prices):
            return 0.0
        return float(self.prices[min(int(np.searchsorted(self.wins, won)), len(self.prices) - 1)])


class IndependentChoices:
    """Choices by their own costs and resource use, without effects such as casts.

    At a given price of a limit, each choice is a comparison. The resulting prices are initial
    values only; no bound depends on them.

    Args:
        groups: variables of each choice.
        costs: costs of all variables.
    """

    def __init__(self, groups: Sequence[Sequence[int]], costs: Array) -> None:
        most = max(map(len, groups), default=1)
        # Pad short groups with their first variable.
        self._groups = np.array(
            [[*group, *[group[0]] * (most - len(group))] for group in groups], np.int64
        ).reshape(-1, most)
        self._costs = costs[self._groups]
        self._each = np.arange(len(self._groups))

    def values(self, count: int, more: Array | None = None) -> Array:
        """Return values of all variables that minimize each choice, with extra costs `more`."""
        costs = self._costs if more is None else self._costs + more[self._groups]
        result: Array = np.zeros(count)
        result[self._groups[self._each, costs.argmin(axis=1)]] = 1.0
        return result

    def curve(self, factors: Array) -> TradeoffCurve:
        """Return the trade-off curve of a row: steps along the lower convex hull of each choice."""
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
"""Relative distance of two prices of a limit below which the limit becomes a row."""
_CLOSE: Final = 1e-4
"""Relative potential increase of the bound below which the limit becomes a row."""
_BEYOND: Final = 1.25
"""Factor on the logarithm of the price change that independent choices predict."""
_FARTHEST: Final = math.log(16)
"""Maximum logarithm of the price change in one step."""
_LEAST: Final = 1e-9
"""Price below which a limit has no cost; above its inverse no price enforces it."""
_SWITCHES: Final = 6
"""Maximum number of limits that are priced, one after another."""
_FREE: Final = 256
"""Number of choices that the first integer program leaves open."""
_MISSED: Final = 1e-6
"""Feasibility tolerance of rows, in thousandths."""


class Coupling:
    """Limits that couple distant operators: on each part, or if `running` on each partial sum."""

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
        """Return the excess over each limit."""
        parts = np.bincount(self._rows, self.factors * values[self.variables], len(self))
        result: Array = self._summed(parts) + self.constants - self.most
        return result

    def row(self, index: int, count: int) -> tuple[Array, float]:
        """Return the factors of all variables in a row, and its upper limit."""
        those = self._rows <= index if self.running else self._rows == index
        factors: Array = np.bincount(self.variables[those], self.factors[those], count)
        return factors, float(self.most[index] - self.constants[index])

    def _summed(self, parts: Array) -> Array:
        result: Array = np.cumsum(parts) if self.running else parts
        return result


@dataclass
class _Active:
    """Limit that is part of the solver's program.

    Attributes:
        column: index of its slack variable.
        factors, most: the row and its upper limit.
    """

    column: int
    factors: Array
    most: float


@dataclass(frozen=True)
class _Line:
    """Lagrangian of a solution as a function of the price: `cost + price * over`."""

    price: float
    cost: float
    over: float


class LagrangianRelaxation:
    """Lagrangian relaxation of coupling limits, followed by small integer programs.

    Without limits that couple distant operators (time until each bucket is sent, live memory), a
    program decomposes into small parts and solves quickly. A limit therefore enters only once it is
    violated, first with a price that is adjusted until the limit is just met, then as a row.
    `IndependentChoices` predicts the binding limit and its price. Few choices of the relaxed
    solution are fractional; these and the nearly fractional ones are decided by an integer program
    in which all other choices are fixed.

    Args:
        program: the program without limits.
        limits: limits of the program.
        groups: variables of each choice; exactly one of a group is 1.
        seconds: time limit.
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
        """Return integer choices within the gap, else the best found; None if there are none."""
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
        """Return the relaxed solution; None if there is none or time is up."""
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
        # Replace prices by rows: first fix the slack of each priced limit to 0.
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
        """Find the price at which a limit is just met.

        Returns the solution, the price, and false if another limit is violated instead.
        """
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
                    # The other limit is binding.
                    self._highs.changeColCost(active.column, 0.0)
                    del self._active[limit]
                    return values, price, False
            if low is not None and high is not None:
                # The bound is at most the value at the intersection of both lines.
                meet = (high.cost - low.cost) / (low.over - high.over)
                inside = low.price * (1 + _NEAR) < meet < high.price * (1 - _NEAR)
                near = low.cost + meet * low.over - self.bound <= _CLOSE * abs(self.bound)
                near = near or high.price - low.price <= _NEAR * high.price
                price = meet if inside else (low.price * high.price) ** 0.5
            else:
                # Move somewhat farther than independent choices predict, to bracket the price.
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
        """Return the binding limit and price for independent choices; None if all are met."""
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
        """Return the limit with the largest violation; None if all limits are met."""
        result, most = None, _MISSED
        for number, limits in enumerate(self.limits):
            if len(limits) and (beyond := limits.beyond(values)).max() > most:
                result, most = (number, int(beyond.argmax())), float(beyond.max())
        return result

    def _margins(self, values: Array) -> list[tuple[float, int]]:
        """Return the choices, fractional first, then by the cost of their best alternative."""
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
        """Return an integer solution with the first `free` choices open and all others fixed."""
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
                # All choices are open, and the rows are a subset of the required rows.
                self.bound = max(self.bound, float(highs.getInfo().mip_dual_bound))
            if (worst := self._worst(result)) is None:
                return result
            if worst in self._active:
                return None
            factors, most = self.limits[worst[0]].row(worst[1], self.count)
            self._active[worst] = _Active(-1, factors, most)


_OPEN: Final = 40
"""Integer variables left open at first, and all others with the same reduced cost."""
_MOST: Final = 0.75
"""Share of open variables above which fixing does not pay."""
_SLACK: Final = 1e-6
"""Relative error assumed for the relaxed objective."""


def solve(
    program: LinearProgram, gap: float, seconds: float, start: Mapping[int, float]
) -> LpSolution:
    """Solve a program with reduced-cost fixing; see `LinearProgram.solve`.

    The relaxed program solves quickly and leaves few variables fractional. The reduced cost of a
    variable bounds the increase of the objective if it leaves its relaxed value. Variables with
    high reduced cost are fixed, the rest is solved, and its objective shows which further variables
    cannot improve it (Dantzig, Fulkerson and Johnson, "Solution of a Large-Scale Traveling-Salesman
    Problem", 1954). If most variables stay open, the full program is solved with the best solution
    as start.
    """
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
        # A higher reduced cost cannot improve on the best solution by more than half of the gap.
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
