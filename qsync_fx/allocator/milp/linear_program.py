"""A linear program as it is built: variables from 0 to 1 or above, and rows that are sparse.

Invariant: what is built in one order is solved to one solution: HiGHS runs on one thread, and stops for a gap before it stops for time.

Python's search for cycles rests while plans are searched for.

A search makes hundreds of thousands of objects that live until it ends, and hardly a cycle. Each few thousand of them have Python look for
cycles, now and then through all that the process holds: of one that has a model and torch that takes as long as a search, or longer.

Invariant: whether cycles are searched for is afterwards what it was before.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import highspy
import numpy as np

from qsync_fx.predictor.replayer.device_timeline import Array


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Lets no cycles be searched for meanwhile; what no cycle holds goes as ever."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


CONSTANT: Final = -1
"""In the place of a variable: what an expression has beside its variables."""
INFINITY: Final = float(highspy.kHighsInf)
_BETWEEN: Final = 1e-6
"""How far from a whole number a value is not one."""

Expression = Mapping[int, float]
"""A sum: the factor of each variable, and the constant."""

ONE: Final[Expression] = {CONSTANT: 1.0}


@dataclass(frozen=True)
class LpSolution:
    """
    Attributes:
        values: of the variables; None where there is no solution.
        objective: of it.
        bound: that no solution is below; the objective of an LP.
        infeasible: whether it is known that there is no solution.
        stopped: whether time ran out.
        reduced: of an LP, what it costs at least to move each variable off the end that it is at.
    """

    values: Array | None
    objective: float
    bound: float
    infeasible: bool = False
    stopped: bool = False
    reduced: Array | None = None

    def between(self, variables: Array) -> Array:
        """Returns of each of some variables whether it is not whole in it."""
        assert self.values is not None
        values = self.values[variables]
        result: Array = np.abs(values - np.round(values)) > _BETWEEN
        return result


class LinearProgram:
    """What is to be minimised, within what."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self._starts: list[int] = [0]
        self._variables: list[int] = []
        self._factors: list[float] = []
        self._least: list[float] = []
        self._most: list[float] = []
        self._any: dict[object, Expression] = {}
        self._all: dict[object, Expression] = {}
        self._least_of: dict[object, Expression] = {}

    @property
    def choices(self) -> Array:
        """The places of whole variables."""
        return np.flatnonzero(self.whole)

    def variable(self, cost: float = 0.0, upper: float = 1.0, full: bool = False) -> int:
        """Returns a new variable, from 0."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.whole.append(full)
        return len(self.costs) - 1

    def row(self, terms: Expression, least: float = -INFINITY, most: float = INFINITY) -> int:
        """Keeps an expression between two numbers; returns the row's place.

        Raises:
            ValueError: a number is NaN, of which HiGHS makes now one thing and now another.
        """
        constant = terms.get(CONSTANT, 0.0)
        if not (least - constant <= INFINITY and most - constant >= -INFINITY):
            raise ValueError(f"a row between {least - constant} and {most - constant}")
        for variable, factor in terms.items():
            if variable != CONSTANT and factor:
                self._variables.append(variable)
                self._factors.append(factor)
        self._starts.append(len(self._variables))
        self._least.append(least - constant)
        self._most.append(most - constant)
        return len(self._most) - 1

    def any_of(self, wants: Iterable[Expression], unless: Expression | None = None) -> Expression:
        """Returns what is 1 where one of `wants`, each 0 or 1, is and `unless` is not; it may be more where that wins nothing."""
        distinct = {tuple(sorted(want.items())): want for want in wants if any(want.values())}
        if any(constant(want) == 1 for want in distinct.values()):
            return ONE if not unless else total((1.0, ONE), (-1.0, unless))
        if len(distinct) <= 1 and not unless:
            return next(iter(distinct.values()), {})
        key = frozenset(distinct), tuple(sorted((unless or {}).items()))
        if key not in self._any:
            result = {self.variable(): 1.0}
            for want in distinct.values():
                self.row(total((1.0, want), (-1.0, unless or {}), (-1.0, result)), most=0.0)
            self._any[key] = result
        return self._any[key]

    def at_least(self, expression: Expression) -> Expression:
        """Returns what is no less than an expression that is 1 at most, nor than nothing; it may be more where that wins nothing."""
        available = constant(expression)
        if available is not None:
            return {CONSTANT: max(0.0, available)}
        key = frozenset([tuple(sorted(expression.items()))]), ()
        if key not in self._any:
            result = {self.variable(): 1.0}
            self.row(total((1.0, expression), (-1.0, result)), most=0.0)
            self._any[key] = result
        return self._any[key]

    def at_most(self, bounds: Iterable[Expression]) -> Expression:
        """Returns what is no more than any of several bounds, nor than 1; it may be less where that wins nothing."""
        distinct: dict[tuple[tuple[int, float], ...], Expression] = {}
        for bound in bounds:
            available = constant(bound)
            if available is None:
                distinct[tuple(sorted(bound.items()))] = bound
            elif available <= 0:
                return {}
        if not distinct:
            return ONE
        if len(distinct) == 1 and self.most(only := next(iter(distinct.values()))) <= 1:
            return only
        key = frozenset(distinct)
        if key not in self._least_of:
            self._least_of[key] = result = {self.variable(): 1.0}
            for bound in distinct.values():
                self.row(total((1.0, result), (-1.0, bound)), most=0.0)
        return self._least_of[key]

    def most(self, expression: Expression) -> float:
        """Returns what an expression is at most."""
        return sum(
            factor if variable == CONSTANT else max(0.0, factor) * self.upper[variable]
            for variable, factor in expression.items()
        )

    def all_of(self, wants: Iterable[Expression]) -> Expression:
        """Returns what is 1 where all of `wants`, each 0 or 1, are, and 0 elsewhere, whatever wins."""
        distinct = {tuple(sorted(want.items())): want for want in wants if constant(want) != 1}
        if any(constant(want) == 0 for want in distinct.values()):
            return {}
        if len(distinct) <= 1:
            return next(iter(distinct.values()), ONE)
        key = frozenset(distinct)
        if key not in self._all:
            result = {self.variable(): 1.0}
            for want in distinct.values():
                self.row(total((1.0, result), (-1.0, want)), most=0.0)
            self.row(
                total((1.0, result), *((-1.0, want) for want in distinct.values())),
                least=1.0 - len(distinct),
            )
            self._all[key] = result
        return self._all[key]

    def change_limit(self, row: int, most: float) -> None:
        """Gives a row another upper limit."""
        self._most[row] = most

    def solve(
        self,
        gap: float,
        seconds: float,
        start: Mapping[int, float] | None = None,
        relaxed: bool = False,
        fixed: Mapping[int, float] | None = None,
    ) -> LpSolution:
        """Solves it.

        Args:
            gap: that the objective may be above the bound, of what it is.
            seconds: after which it is given up.
            start: values of whole variables to start from.
            relaxed: whether whole variables may be anything between.
            fixed: variables that are given.
        """
        highs = self.highs(relaxed, fixed)
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("time_limit", float(seconds))
        if start and not relaxed:
            highs.setSolution(
                len(start),
                np.array(list(start), np.int32),
                np.array(list(start.values()), np.float64),
            )
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        states = highspy.HighsModelStatus
        infeasible = status in (states.kInfeasible, states.kUnboundedOrInfeasible)
        # The objective of an LP is a bound once it is optimal, and not before.
        unfinished = relaxed and status != states.kOptimal
        if (
            infeasible
            or unfinished
            or info.primal_solution_status != highspy.kSolutionStatusFeasible
        ):
            return LpSolution(None, INFINITY, INFINITY, infeasible, status == states.kTimeLimit)
        objective = float(info.objective_function_value)
        bound = objective if relaxed else min(objective, float(info.mip_dual_bound))
        solution = highs.getSolution()
        reduced = np.abs(np.array(solution.col_dual)) if relaxed else None
        return LpSolution(
            np.array(solution.col_value),
            objective,
            bound,
            False,
            status == states.kTimeLimit,
            reduced,
        )

    def highs(self, relaxed: bool, fixed: Mapping[int, float] | None = None) -> highspy.Highs:
        """Returns the solver, with the program; see `solve`."""
        highs: highspy.Highs = highspy.Highs()  # type: ignore[no-untyped-call]
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("threads", 1)
        highs.setOptionValue("primal_feasibility_tolerance", TOLERANCE)
        highs.setOptionValue("mip_feasibility_tolerance", TOLERANCE)
        problem = highspy.HighsLp()
        problem.num_col_, problem.num_row_ = len(self.costs), len(self._most)
        problem.col_cost_ = np.array(self.costs)
        lower, upper = np.zeros(len(self.costs)), np.array(self.upper)
        for variable, value in (fixed or {}).items():
            lower[variable] = upper[variable] = value
        problem.col_lower_, problem.col_upper_ = lower, upper
        problem.row_lower_, problem.row_upper_ = np.array(self._least), np.array(self._most)
        matrix = problem.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.array(self._starts, np.int32)
        matrix.index_ = np.array(self._variables, np.int32)
        matrix.value_ = np.array(self._factors)
        if not relaxed:
            kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
            problem.integrality_ = [kinds[full] for full in self.whole]
        highs.passModel(problem)
        return highs


TOLERANCE: Final = 1e-8
"""By how much a solution may miss a row or a whole number; rows of time are in thousandths of a step."""


def total(*terms: tuple[float, Expression]) -> dict[int, float]:
    """Returns a sum of expressions with factors."""
    result: dict[int, float] = {}
    for factor, expression in terms:
        for variable, value in expression.items():
            result[variable] = result.get(variable, 0.0) + factor * value
    return result


def constant(expression: Expression) -> float | None:
    """Returns what an expression without variables is; None for one with some."""
    for variable, factor in expression.items():
        if factor and variable != CONSTANT:
            return None
    return expression.get(CONSTANT, 0.0)


def value(expression: Expression, values: Array) -> float:
    """Returns what an expression is where variables have values."""
    return sum(
        factor * (1.0 if index == CONSTANT else float(values[index]))
        for index, factor in expression.items()
    )
