"""Program of all device classes within limits: construction, solution, plans.

No plan of a program is below its bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qsync_fx.allocator.codec_choice import Codecs
from qsync_fx.allocator.evaluator import TOLERANCE, PlanEvaluator
from qsync_fx.allocator.milp.communication_terms import THOUSANDTHS, fixed_plan_seconds, sending
from qsync_fx.allocator.milp.device_program import DeviceProgram, MemoryTerms, device_program
from qsync_fx.allocator.milp.format_variables import OperatorCosts
from qsync_fx.allocator.milp.linear_program import (
    INFINITY,
    Expression,
    LinearProgram,
    Relaxation,
    solve_with_fixing,
    total,
)
from qsync_fx.allocator.problem import Asked, Plans, Problem


@dataclass(frozen=True)
class Constraints:
    """Limits of a program: seconds, live bytes by class, and variance; None for no limit."""

    seconds: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    variance: float | None = None


@dataclass(frozen=True)
class Solution:
    """Plans of some classes that solve a program, or None; value and bound of the objective.

    `infeasible`: no plan meets the limits; `stopped`: the time limit was reached.
    """

    plans: Plans | None
    value: float
    bound: float
    infeasible: bool
    stopped: bool
    codecs: Codecs | None = None


def find(
    problem: Problem,
    evaluator: PlanEvaluator,
    costs: Mapping[str, OperatorCosts],
    live: Mapping[str, MemoryTerms],
    limits: Constraints,
    least: str,
    names: Sequence[str],
    start: Plans,
    gap: float,
    seconds: float,
) -> Solution:
    """Return the plans of some classes that minimize an objective within limits.

    `least` is "variance", "seconds", or "memory" for a single class. `start` and the evaluator's
    codecs are a warm start, `gap` is the allowed relative gap, `seconds` the time limit.
    """
    unit = max(evaluator.seconds, 1e-12)
    program = LinearProgram()
    memory = {name: live[name] for name in names if least == "memory" or name in limits.memory}
    sends = sending(program, evaluator.options, unit)
    devices = [
        device_program(
            program, problem, evaluator, name, costs[name], unit, memory.get(name), sends
        )
        for name in names
    ]
    others = list(fixed_plan_seconds(problem, evaluator, sends, unit))
    variance = total((1.0, sends.variance), *((1.0, device.variance) for device in devices))
    if least == "seconds":
        scale = _minimize_seconds(program, devices, others, unit)
    elif least == "memory":
        scale = _minimize_memory(program, devices)
    else:
        scale = _minimize_variance(program, variance)
    if limits.seconds is not None:
        most = THOUSANDTHS * limits.seconds / unit * (1 + TOLERANCE / 2)
        if evaluator.options.open:
            for other in others:
                program.row(other, most=most)
        for device in devices:
            for variable in device.ready(program):
                program.row({variable: 1.0}, most=most - device.after)
    for device in devices:
        if (limit := limits.memory.get(device.name)) is not None:
            _limit_memory(program, device, limit)
    if limits.variance is not None and limits.variance < INFINITY:
        size = max([limits.variance, *variance.values()]) or 1.0
        most = THOUSANDTHS * limits.variance / size * (1 + TOLERANCE / 2)
        program.row(total((THOUSANDTHS / size, variance)), most=most)
    first = sends.start(evaluator.codecs)
    for device in devices:
        for operator, by in device.formats.choices.items():
            chosen = start[device.name][operator]
            first |= {variable: float(fmt == chosen) for fmt, variable in by.items()}
    result = solve_with_fixing(program, gap, seconds, first)
    if result.values is None:
        return Solution(None, INFINITY, INFINITY, result.infeasible, result.stopped)
    values = result.values.tolist()
    return Solution(
        {device.name: device.formats.plan_of(values) for device in devices},
        result.objective / scale,
        result.bound / scale,
        infeasible=False,
        stopped=result.stopped,
        codecs=sends.chosen(values),
    )


class ClassBound:
    """Lower bound of the variance of the only open class of a problem, by limit of the seconds.

    The bound is the LP relaxation of the class's program; its limit of the memory counts only if
    `memory` has terms.
    """

    def __init__(
        self,
        problem: Problem,
        evaluator: PlanEvaluator,
        costs: OperatorCosts,
        memory: MemoryTerms | None = None,
    ) -> None:
        (name,) = problem.open
        self._unit = max(evaluator.seconds, 1e-12)
        program = LinearProgram()
        sends = sending(program, evaluator.options, self._unit)
        device = device_program(program, problem, evaluator, name, costs, self._unit, memory, sends)
        self._scale = _minimize_variance(program, device.variance)
        self._after, self._ready = device.after, device.ready(program)
        if memory is not None and (limit := problem.classes[name].memory) is not None:
            _limit_memory(program, device, limit)
        self._relaxation = Relaxation(program)

    def variance(self, seconds: float) -> float:
        """Return a lower bound of the variance of plans within a limit; infinite if none fits."""
        most = THOUSANDTHS * seconds / self._unit * (1 + TOLERANCE / 2) - self._after
        if most < 0:
            return INFINITY
        bound = self._relaxation.lower_bound(dict.fromkeys(self._ready, min(most, INFINITY)))
        return max(bound / self._scale, 0.0)


def _limit_memory(program: LinearProgram, device: DeviceProgram, limit: float) -> None:
    for expression in device.live:
        most = THOUSANDTHS * (1 + TOLERANCE / 2)
        program.row(total((THOUSANDTHS / limit, expression)), most=most)


def _minimize_variance(program: LinearProgram, variance: Expression) -> float:
    """Make the variance the objective; return its scale."""
    scale = THOUSANDTHS / (max(variance.values(), default=0.0) or 1.0)
    for variable, factor in variance.items():
        program.costs[variable] += scale * factor
    return scale


def _minimize_seconds(
    program: LinearProgram,
    devices: Sequence[DeviceProgram],
    others: Sequence[Expression],
    unit: float,
) -> float:
    """Make the seconds of a step the objective; return its scale."""
    step = program.variable(1.0, INFINITY)
    for device in devices:
        for variable in device.ready(program):
            program.row({variable: 1.0, step: -1.0}, most=-device.after)
    for other in others:
        program.row(total((1.0, other), (-1.0, {step: 1.0})), most=0.0)
    return THOUSANDTHS / unit


def _minimize_memory(program: LinearProgram, devices: Sequence[DeviceProgram]) -> float:
    """Make the peak memory the objective; return its scale."""
    peak = program.variable(1.0, INFINITY)
    live = [expression for device in devices for expression in device.live]
    sizes = (sum(map(abs, expression.values())) for expression in live)
    scale = THOUSANDTHS / (max(sizes, default=0.0) or 1.0)
    for expression in live:
        program.row(total((scale, expression), (-1.0, {peak: 1.0})), most=0.0)
    return scale


def together(results: Sequence[Solution], more: float) -> Solution:
    """Return the combined result of independent programs, plus a constant `more`."""
    plans: dict[str, Asked] = {}
    for item in results:
        if item.plans is None:
            return item
        plans |= item.plans
    return Solution(
        plans,
        sum(item.value for item in results) + more,
        sum(item.bound for item in results) + more,
        any(item.infeasible for item in results),
        any(item.stopped for item in results),
        next((item.codecs for item in results if item.codecs is not None), None),
    )
