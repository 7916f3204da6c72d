"""Linear programs: sparse builder, logical expressions and the HiGHS solver.

An `Expression` maps variables to factors. `LinearProgram` collects variables in [0, upper] and
sparse rows; `any_of`, `all_of` and `at_least` add rows for logical terms.

Invariant: equal programs have equal solutions. HiGHS runs on one thread, and the gap is meant to
end a run before the time limit.
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
    """Disable the cyclic garbage collector; reference counting still frees objects.

    A search creates hundreds of thousands of long-lived objects and hardly a cycle. Collections
    traverse all objects of the process, including the model and torch, and can take longer than the
    search.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


CONSTANT: Final = -1
"""Key of the constant term of an expression."""
INFINITY: Final = float(highspy.kHighsInf)
_BETWEEN: Final = 1e-6
"""Tolerance of integrality."""

Expression = Mapping[int, float]
"""Sum of variables with factors, and a constant."""

ONE: Final[Expression] = {CONSTANT: 1.0}


@dataclass(frozen=True)
class LpSolution:
    """Solution of a program.

    Attributes:
        values: values of the variables; None if there is no solution.
        objective: value of the objective.
        bound: lower bound of the objective; equal to the objective for an LP.
        infeasible: whether the program is known to be infeasible.
        stopped: whether the time limit was reached.
        reduced: absolute reduced cost of each variable, of an LP.
    """

    values: Array | None
    objective: float
    bound: float
    infeasible: bool = False
    stopped: bool = False
    reduced: Array | None = None

    def between(self, variables: Array) -> Array:
        """Return whether each of some variables is fractional."""
        assert self.values is not None
        values = self.values[variables]
        result: Array = np.abs(values - np.round(values)) > _BETWEEN
        return result


class LinearProgram:
    """Minimization problem over continuous and integer variables, with sparse rows."""

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

    @property
    def choices(self) -> Array:
        """Indices of the integer variables."""
        return np.flatnonzero(self.whole)

    def variable(self, cost: float = 0.0, upper: float = 1.0, full: bool = False) -> int:
        """Return a new variable with lower bound 0; `full` makes it an integer variable."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.whole.append(full)
        return len(self.costs) - 1

    def row(self, terms: Expression, least: float = -INFINITY, most: float = INFINITY) -> int:
        """Add a row that bounds an expression, and return its index.

        Raises:
            ValueError: a bound is NaN, for which HiGHS is not deterministic.
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
        """Return an upper bound of the OR of `wants` and not `unless`, for 0/1 expressions.

        The result is exact if a larger value does not improve the objective.
        """
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
        """Return an upper bound of max(0, expression), for an expression of at most 1.

        The result is exact if a larger value does not improve the objective.
        """
        available = constant(expression)
        if available is not None:
            return {CONSTANT: max(0.0, available)}
        key = frozenset([tuple(sorted(expression.items()))]), ()
        if key not in self._any:
            result = {self.variable(): 1.0}
            self.row(total((1.0, expression), (-1.0, result)), most=0.0)
            self._any[key] = result
        return self._any[key]

    def all_of(self, wants: Iterable[Expression]) -> Expression:
        """Return the AND of 0/1 expressions, exact for any objective."""
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

    def solve(
        self,
        gap: float,
        seconds: float,
        start: Mapping[int, float] | None = None,
        relaxed: bool = False,
        fixed: Mapping[int, float] | None = None,
    ) -> LpSolution:
        """Solve the program.

        Args:
            gap: relative gap between objective and bound at which the solver stops.
            seconds: time limit.
            start: values of integer variables for a warm start.
            relaxed: whether to solve the LP relaxation.
            fixed: variables with fixed values.
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
        # The objective of an LP is a bound only once it is optimal.
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
        """Return a HiGHS instance with the program; see `solve`."""
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
"""Feasibility and integrality tolerance; rows of time are in thousandths of a step."""


def total(*terms: tuple[float, Expression]) -> dict[int, float]:
    """Return the weighted sum of expressions."""
    result: dict[int, float] = {}
    for factor, expression in terms:
        for variable, value in expression.items():
            result[variable] = result.get(variable, 0.0) + factor * value
    return result


def constant(expression: Expression) -> float | None:
    """Return the value of an expression without variables; None if it has variables."""
    for variable, factor in expression.items():
        if factor and variable != CONSTANT:
            return None
    return expression.get(CONSTANT, 0.0)
