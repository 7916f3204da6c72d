"""MILP of one or several device classes within limits: construction, solution, plans.

Large programs are solved by `LagrangianRelaxation` first. `CommunicationTerms` models the codec
choice per gradient bucket. If any bucket is coded, all buckets go through the all-reduce of
qsync_fx, in which FP32 buckets cost a copy; one binary variable states this.

Invariant: no plan of the program is below the bound. With fixed codecs, seconds and variance equal
the values in `CodecOptions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from qsync_fx.allocator.codec_choice import CodecOptions, Codecs
from qsync_fx.allocator.evaluator import TOLERANCE, PlanEvaluator
from qsync_fx.allocator.milp import lagrangian_relaxation
from qsync_fx.allocator.milp.device_program import THOUSANDTHS, DeviceProgram, device_program
from qsync_fx.allocator.milp.format_variables import OperatorCosts
from qsync_fx.allocator.milp.lagrangian_relaxation import Coupling, LagrangianRelaxation
from qsync_fx.allocator.milp.linear_program import (
    CONSTANT,
    INFINITY,
    Expression,
    LinearProgram,
    total,
)
from qsync_fx.allocator.milp.memory_bound.lower_bound import LowerBoundTerm
from qsync_fx.allocator.problem import Asked, Plans, Problem
from qsync_fx.communication.codecs import PLAIN


@dataclass(frozen=True)
class CommunicationTerms:
    """Expressions of the transfer of gradient buckets.

    Attributes:
        travel: transfer time by bucket, in thousandths of the unit.
        delays: delay of computation by bucket without slowdown, in thousandths of the unit.
        variance: variance that codecs add to the mean gradient.
        choices: variable of each codec, by bucket; empty if there is no choice.
        coded: variable that is 1 if any bucket is coded; None if there is no choice.
    """

    travel: Sequence[Expression]
    delays: Sequence[Expression]
    variance: Expression
    choices: Sequence[Mapping[str, int]] = ()
    coded: int | None = None

    def start(self, codecs: Codecs) -> dict[int, float]:
        """Return the values of the integer variables for a codec choice."""
        result = {
            variable: float(name == codec)
            for by, codec in zip(self.choices, codecs, strict=True)
            for name, variable in by.items()
        }
        if self.coded is not None:
            result[self.coded] = float(any(codec != PLAIN.name for codec in codecs))
        return result

    def chosen(self, values: Sequence[float]) -> Codecs:
        """Return the codec of each bucket in a solution."""
        return tuple(max(by, key=lambda name: values[by[name]]) for by in self.choices)


def sending(program: LinearProgram, options: CodecOptions, unit: float) -> CommunicationTerms:
    """Add the codec choice to a program."""
    scale = THOUSANDTHS / unit
    if not options.open:
        available = [
            [{CONSTANT: scale * seconds} for seconds in item]
            for item in (options.alone, options.alone_delays)
        ]
        return CommunicationTerms(available[0], available[1], {})
    any_coded = program.variable(full=True)
    choices: list[dict[str, int]] = []
    travel: list[Expression] = []
    neighbours: list[Expression] = []
    variance: dict[int, float] = {}
    each = zip(
        options.alone,
        options.alone_delays,
        options.seconds,
        options.delays,
        options.variance,
        strict=True,
    )
    for alone, alone_delays, seconds, later, adds in each:
        by = {codec: program.variable(full=True) for codec in seconds}
        program.row(dict.fromkeys(by.values(), 1.0), least=1.0, most=1.0)
        narrow = {codec: variable for codec, variable in by.items() if codec != PLAIN.name}
        program.row({**dict.fromkeys(narrow.values(), 1.0), any_coded: -1.0}, most=0.0)
        for into, plain, coded in ((travel, alone, seconds), (neighbours, alone_delays, later)):
            exchanged = coded[PLAIN.name]
            terms = {
                variable: scale * (coded[codec] - exchanged) for codec, variable in narrow.items()
            }
            into.append({CONSTANT: scale * plain, any_coded: scale * (exchanged - plain), **terms})
        variance |= {variable: adds[codec] for codec, variable in narrow.items()}
        choices.append(by)
    program.row({**dict.fromkeys(variance, -1.0), any_coded: 1.0}, most=0.0)
    return CommunicationTerms(travel, neighbours, variance, choices, any_coded)


def fixed_plan_seconds(
    problem: Problem, evaluator: PlanEvaluator, result: CommunicationTerms, unit: float
) -> Iterator[Expression]:
    """Yield step times by bucket of the classes with a fixed plan, in thousandths of the unit."""
    scale = THOUSANDTHS / unit
    for name, part in problem.classes.items():
        if part.fixed_plan is None:
            continue
        fleet = evaluator.timeline.played
        device = fleet.devices[name]
        slowdown = problem.cluster.devices[name].slowdown
        # Only the delay by transfers depends on the codecs; all other times are constant.
        available = slowdown * np.cumsum([0.0, *evaluator.computed_later])
        ends = np.append(device.ready, device.computed) - available + fleet.after(name)
        for index, end in enumerate(ends.tolist()):
            sent = [(slowdown, item) for item in result.delays[:index]]
            yield total(
                (1.0, {CONSTANT: scale * end}),
                *sent,
                *((1.0, item) for item in result.travel[index:]),
            )


LARGE: Final = 4000
"""Number of integer variables from which the relaxed program is solved first."""


@dataclass(frozen=True)
class Constraints:
    """Limits of a program.

    Attributes:
        seconds: limit of a step; None for no limit.
        memory: limit of live bytes, by class.
        variance: limit of the variance of the mean gradient; None for no limit.
        without: plans excluded by class: they exceed memory although the program admits them.
    """

    seconds: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    variance: float | None = None
    without: Mapping[str, Sequence[Asked]] = field(default_factory=dict)


@dataclass(frozen=True)
class Solution:
    """Plans of some classes that solve a program.

    Attributes:
        plans: plans by class; None if none were found.
        value: value of the objective.
        bound: lower bound of the objective.
        infeasible: whether no plan meets the limits.
        stopped: whether the time limit was reached.
        codecs: codec of each bucket, if chosen in the program.
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
    live: Mapping[str, LowerBoundTerm],
    limits: Constraints,
    least: str,
    names: Sequence[str],
    start: Plans,
    gap: float,
    seconds: float,
) -> Solution:
    """Return the plans of some classes that minimize an objective within limits.

    Args:
        problem: the planning problem.
        evaluator: evaluator; its codecs are part of the warm start.
        costs: times of operator states, by class.
        live: memory terms, by class.
        limits: limits of the program.
        least: objective: "variance", "seconds", or "memory" for a single class.
        names: classes to choose plans for.
        start: plans for a warm start.
        gap: allowed relative gap.
        seconds: time limit.
    """
    unit = max(evaluator.seconds, 1e-12)
    program = LinearProgram()
    memory = {name: live[name] for name in names if least == "memory" or name in limits.memory}
    sends = sending(program, evaluator.options, unit)
    devices = [
        device_program(
            program,
            problem,
            evaluator,
            name,
            costs[name],
            unit,
            memory.get(name),
            sends.travel,
            sends.delays,
        )
        for name in names
    ]
    others = list(fixed_plan_seconds(problem, evaluator, sends, unit))
    if limits.seconds is not None and evaluator.options.open:
        for other in others:
            program.row(other, most=_most_seconds(limits.seconds, unit))
    scale = _minimised(program, devices, sends, others, least, unit)
    for device in devices:
        for requested in limits.without.get(device.name, ()):
            _excluded(program, device, requested)
    result = None
    if least == "variance" and limits.variance is None and sum(program.whole) >= LARGE:
        groups = {
            id(item): list(item.values())
            for device in devices
            for item in device.formats.choices.values()
        }
        every = [*groups.values(), *(list(by.values()) for by in sends.choices)]
        result = LagrangianRelaxation(
            program, list(_coupling(devices, limits, unit)), every, seconds
        ).solved(gap)
    if result is None:
        _limited(program, devices, sends, limits, unit)
        first = {
            variable: item
            for device in devices
            for variable, item in _chosen(device, start[device.name]).items()
        }
        result = lagrangian_relaxation.solve(
            program, gap, seconds, first | sends.start(evaluator.codecs)
        )
    if result.values is None:
        return Solution(None, INFINITY, INFINITY, result.infeasible, result.stopped)
    values = result.values.tolist()
    plans = {device.name: device.formats.asked(values) for device in devices}
    codecs = sends.chosen(values) if evaluator.options.open else None
    return Solution(
        plans, result.objective / scale, result.bound / scale, False, result.stopped, codecs
    )


def _coupling(
    devices: Sequence[DeviceProgram], limits: Constraints, unit: float
) -> Iterator[Coupling]:
    """Yield the limits of seconds and memory as coupling rows."""
    for device in devices:
        if limits.seconds is not None:
            most = _most_seconds(limits.seconds, unit) - device.after
            yield Coupling(device.segments, [most] * len(device.segments), running=True)
        if (limit := limits.memory.get(device.name)) is not None:
            live = [total((THOUSANDTHS / limit, item)) for item in device.held]
            yield Coupling(live, [_most_held()] * len(live), running=False)


def _most_seconds(seconds: float, unit: float) -> float:
    return THOUSANDTHS * seconds / unit * (1 + TOLERANCE / 2)


def _most_held() -> float:
    return THOUSANDTHS * (1 + TOLERANCE / 2)


def _limited(
    program: LinearProgram,
    devices: Sequence[DeviceProgram],
    sends: CommunicationTerms,
    limits: Constraints,
    unit: float,
) -> None:
    for device in devices:
        if limits.seconds is not None:
            most = _most_seconds(limits.seconds, unit) - device.after
            for variable in device.ready(program):
                program.row({variable: 1.0}, most=most)
        if (limit := limits.memory.get(device.name)) is not None:
            for live in device.held:
                program.row(total((THOUSANDTHS / limit, live)), most=_most_held())
    if limits.variance is not None and limits.variance < INFINITY:
        variance = _variance(devices, sends)
        size = max([limits.variance, *variance.values()])
        if size > 0:
            most = limits.variance / size * (1 + TOLERANCE / 2)
            program.row(total((THOUSANDTHS / size, variance)), most=THOUSANDTHS * most)


def _excluded(program: LinearProgram, device: DeviceProgram, requested: Asked) -> None:
    """Exclude one plan: not all of its choices can be made together."""
    choices = [
        {entry[requested[operator]]: 1.0} for operator, entry in device.formats.choices.items()
    ]
    program.row(total(*((1.0, choice) for choice in choices)), most=len(choices) - 1.0)


def _variance(devices: Sequence[DeviceProgram], sends: CommunicationTerms) -> dict[int, float]:
    return total(*((1.0, device.variance) for device in devices), (1.0, sends.variance))


def _minimised(
    program: LinearProgram,
    devices: Sequence[DeviceProgram],
    sends: CommunicationTerms,
    others: Sequence[Expression],
    least: str,
    unit: float,
) -> float:
    """Set the objective; return its scale."""
    if least == "seconds":
        step = program.variable(1.0, INFINITY)
        for device in devices:
            for variable in device.ready(program):
                program.row({variable: 1.0, step: -1.0}, most=-device.after)
        for other in others:
            program.row(total((1.0, other), (-1.0, {step: 1.0})), most=0.0)
        return THOUSANDTHS / unit
    if least == "memory":
        peak = program.variable(1.0, INFINITY)
        available = [live for device in devices for live in device.held]
        size = max((sum(map(abs, live.values())) for live in available), default=1.0) or 1.0
        for live in available:
            program.row(total((THOUSANDTHS / size, live), (-1.0, {peak: 1.0})), most=0.0)
        return THOUSANDTHS / size
    costs = _variance(devices, sends)
    size = max(costs.values(), default=0.0) or 1.0
    scale = THOUSANDTHS / size
    for variable, factor in costs.items():
        if variable >= 0:
            program.costs[variable] += scale * factor
    return scale


def _chosen(device: DeviceProgram, requested: Asked) -> dict[int, float]:
    return {
        variable: float(fmt == requested[operator])
        for operator, entry in device.formats.choices.items()
        for fmt, variable in entry.items()
    }


def together(result: Sequence[Solution], more: float) -> Solution:
    """Return the combined result of independent programs, plus a constant `more`."""
    plans: dict[str, Asked] | None = {}
    for item in result:
        plans = None if item.plans is None or plans is None else {**plans, **item.plans}
    return Solution(
        plans,
        sum(item.value for item in result) + more,
        sum(item.bound for item in result) + more,
        any(item.infeasible for item in result),
        any(item.stopped for item in result),
        next((item.codecs for item in result if item.codecs is not None), None),
    )
