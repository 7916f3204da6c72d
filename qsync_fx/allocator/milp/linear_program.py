"""Linear programs: sparse builder, logical expressions and the HiGHS solver.

An `Expression` maps variables to factors. `LinearProgram` collects variables in [0, upper] and
sparse rows. Equal programs have equal solutions: HiGHS runs on one thread, and the gap is meant to
end a run before the time limit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import highspy
import numpy as np

from qsync_fx.predictor.replayer.device_timeline import Array

CONSTANT: Final = -1
"""Key of the constant term of an expression."""
INFINITY: Final = float(highspy.kHighsInf)
TOLERANCE: Final = 1e-8
"""Feasibility and integrality tolerance; rows of time are in thousandths of a step."""
_FRACTIONAL: Final = 1e-6
"""Distance to the next integer above which a value is fractional."""
_OPEN: Final = 40
"""Integer variables left open at first, and all others with the same reduced cost."""
_MOST: Final = 0.75
"""Share of open variables above which fixing does not pay."""
_SLACK: Final = 1e-6
"""Relative error assumed for the relaxed objective."""

Expression = Mapping[int, float]
"""Sum of variables with factors, and a constant."""
Values = Mapping[int, float]
"""Values of some variables."""

ONE: Final[Expression] = {CONSTANT: 1.0}


@dataclass(frozen=True)
class LpSolution:
    """Solution of a program; `values` is None if there is none.

    An LP has an equal objective and bound, and the absolute reduced cost of each variable.
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
        result: Array = np.abs(values - np.round(values)) > _FRACTIONAL
        return result


class LinearProgram:
    """Minimization problem over continuous and integer variables, with sparse rows."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.upper: list[float] = []
        self.integral: list[bool] = []
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
        return np.flatnonzero(self.integral)

    def variable(self, cost: float = 0.0, upper: float = 1.0, full: bool = False) -> int:
        """Return a new variable with lower bound 0; `full` makes it an integer variable."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.integral.append(full)
        return len(self.costs) - 1

    def row(self, terms: Expression, least: float = -INFINITY, most: float = INFINITY) -> None:
        """Bound an expression; raise `ValueError` for NaN, for which HiGHS is not deterministic."""
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

    def any_of(self, wants: Iterable[Expression], unless: Expression | None = None) -> Expression:
        """Return an upper bound of the OR of `wants` and not `unless`, for 0/1 expressions.

        The result is exact if a larger value does not improve the objective.
        """
        distinct = {_key(want): want for want in wants if any(want.values())}
        if any(constant(want) == 1 for want in distinct.values()):
            return total((1.0, ONE), (-1.0, unless or {}))
        if len(distinct) <= 1 and not unless:
            return next(iter(distinct.values()), {})
        key = frozenset(distinct), _key(unless or {})
        if key not in self._any:
            result = {self.variable(): 1.0}
            for want in distinct.values():
                self.row(total((1.0, want), (-1.0, unless or {}), (-1.0, result)), most=0.0)
            self._any[key] = result
        return self._any[key]

    def all_of(self, wants: Iterable[Expression]) -> Expression:
        """Return the AND of 0/1 expressions, exact for any objective."""
        distinct = {_key(want): want for want in wants if constant(want) != 1}
        if any(constant(want) == 0 for want in distinct.values()):
            return {}
        if len(distinct) <= 1:
            return next(iter(distinct.values()), ONE)
        key = frozenset(distinct)
        if key not in self._all:
            result = {self.variable(): 1.0}
            for want in distinct.values():
                self.row(total((1.0, result), (-1.0, want)), most=0.0)
            terms = [(-1.0, want) for want in distinct.values()]
            self.row(total((1.0, result), *terms), least=1.0 - len(distinct))
            self._all[key] = result
        return self._all[key]

    def joint(self, *partitions: Mapping[Any, Expression]) -> dict[tuple[Any, ...], Expression]:
        """Return the indicators of all combinations of the parts of partitions, by their keys.

        In each partition exactly one indicator is 1. The combinations that contain a part sum to
        its indicator.
        """
        keys = list(itertools.product(*partitions))
        for number, partition in enumerate(partitions):
            if len(keys) == len(partition):
                return {key: partition[key[number]] for key in keys}
        result: dict[tuple[Any, ...], Expression] = {key: {self.variable(): 1.0} for key in keys}
        for number, partition in enumerate(partitions):
            for part, where in partition.items():
                terms = [(1.0, joined) for key, joined in result.items() if key[number] == part]
                self.row(total(*terms, (-1.0, where)), least=0.0, most=0.0)
        return result

    def solve(
        self,
        gap: float,
        seconds: float,
        start: Values | None = None,
        relaxed: bool = False,
        fixed: Values | None = None,
    ) -> LpSolution:
        """Solve the program within `seconds`, to a relative gap between objective and bound.

        `start` has values for a warm start. `relaxed` solves the LP relaxation.
        """
        highs = self.highs(relaxed, fixed or {})
        highs.setOptionValue("mip_rel_gap", gap)
        highs.setOptionValue("time_limit", float(seconds))
        if relaxed:
            # The relaxation of a plan's program is solved in less time than presolve takes.
            highs.setOptionValue("presolve", "off")
        elif start:
            values = np.array(list(start.values()), np.float64)
            highs.setSolution(len(start), np.array(list(start), np.int32), values)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        states = highspy.HighsModelStatus
        infeasible = status in (states.kInfeasible, states.kUnboundedOrInfeasible)
        feasible = info.primal_solution_status == highspy.kSolutionStatusFeasible
        # The objective of an LP is a bound only once it is optimal.
        unfinished = relaxed and status != states.kOptimal
        stopped = status == states.kTimeLimit
        if infeasible or unfinished or not feasible:
            return LpSolution(None, INFINITY, INFINITY, infeasible, stopped)
        solution, objective = highs.getSolution(), float(info.objective_function_value)
        values = np.array(solution.col_value)
        if relaxed:
            reduced = np.abs(np.array(solution.col_dual))
            return LpSolution(values, objective, objective, False, stopped, reduced)
        bound = min(objective, float(info.mip_dual_bound))
        return LpSolution(values, objective, bound, False, stopped)

    def highs(self, relaxed: bool, fixed: Values = MappingProxyType({})) -> highspy.Highs:
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
        for variable, value in fixed.items():
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
            problem.integrality_ = [kinds[full] for full in self.integral]
        highs.passModel(problem)
        return highs


class Relaxation:
    """LP relaxation of a program, solved from its last basis after changes of upper bounds."""

    def __init__(self, program: LinearProgram) -> None:
        self._highs = program.highs(relaxed=True)
        # Presolve would discard the basis.
        self._highs.setOptionValue("presolve", "off")

    def lower_bound(self, upper: Values) -> float:
        """Return a lower bound of the program with other upper bounds of some variables.

        It is infinite if the relaxation is infeasible.
        """
        for variable, value in upper.items():
            self._highs.changeColBounds(variable, 0.0, value)
        self._highs.run()
        status, states = self._highs.getModelStatus(), highspy.HighsModelStatus
        if status == states.kInfeasible:
            return INFINITY
        if status != states.kOptimal:
            return -INFINITY
        objective = float(self._highs.getInfo().objective_function_value)
        return objective - _SLACK * abs(objective)


def solve_with_fixing(
    program: LinearProgram, gap: float, seconds: float, start: Values
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
    if len(full) <= _OPEN:
        return program.solve(gap, seconds, start)
    relaxed = program.solve(gap, seconds, relaxed=True)
    if relaxed.values is None or relaxed.reduced is None:
        return program.solve(gap, seconds, start)
    values = relaxed.values[full]
    costs = np.where(relaxed.between(full), 0.0, relaxed.reduced[full])
    floor = relaxed.objective - _SLACK * abs(relaxed.objective)
    margin = float(np.partition(costs, _OPEN)[_OPEN])
    best, bound = LpSolution(None, INFINITY, floor), floor
    for share in (0.25, 0.95):
        expensive = costs > margin
        if expensive.mean() < 1 - _MOST:
            break
        rounded = np.round(values[expensive]).tolist()
        fixed = dict(zip(full[expensive].tolist(), rounded, strict=True))
        result = program.solve(share * gap, until - time.monotonic(), fixed=fixed)
        if result.values is None:
            break
        if result.objective < best.objective:
            best = result
        others = floor + float(costs[expensive].min(initial=INFINITY))
        bound = max(bound, min(result.bound, others))
        if best.objective - bound <= gap * abs(best.objective):
            return replace(best, bound=min(bound, best.objective), stopped=False)
        # A higher reduced cost cannot improve on the best solution by more than half of the gap.
        margin = max(best.objective - floor - gap / 2 * abs(best.objective), 0.0)
    if best.values is not None:
        start = dict(zip(full.tolist(), best.values[full].tolist(), strict=True))
    result = program.solve(gap, until - time.monotonic(), start)
    if result.values is not None:
        bound = max(bound, result.bound)
    better = min(result, best, key=lambda solution: solution.objective)
    bound = min(bound, better.objective)
    return replace(better, bound=bound, infeasible=result.infeasible, stopped=result.stopped)


def total(*terms: tuple[float, Expression]) -> dict[int, float]:
    """Return the weighted sum of expressions."""
    result: dict[int, float] = {}
    for factor, expression in terms:
        add(result, expression, factor)
    return result


def add(result: dict[int, float], expression: Expression, factor: float) -> None:
    """Add an expression with a factor to `result`."""
    for variable, value in expression.items():
        result[variable] = result.get(variable, 0.0) + factor * value


def constant(expression: Expression) -> float | None:
    """Return the value of an expression without variables; None if it has variables."""
    for variable, factor in expression.items():
        if factor and variable != CONSTANT:
            return None
    return expression.get(CONSTANT, 0.0)


def _key(expression: Expression) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(expression.items()))
