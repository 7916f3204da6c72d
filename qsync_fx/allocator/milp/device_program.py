"""Program of one device class: format choices, time per segment, live memory.

The backward pass is divided into segments, one up to the readiness of each gradient bucket and one
after the last. A step is at least as long as all segments up to a bucket plus the transfer of this
and all later buckets; this is the closed form of the replayer. Each segment expression subtracts
the transfer of the previous bucket, so that `DeviceProgram.ready` needs only sparse rows.

Times in rows are in thousandths of `unit`, so that tolerances are relative to a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.allocator.evaluator import PlanEvaluator
from qsync_fx.allocator.milp.cast_terms import Casting
from qsync_fx.allocator.milp.format_variables import Formats, OperatorCosts
from qsync_fx.allocator.milp.linear_program import INFINITY, ONE, Expression, LinearProgram, total
from qsync_fx.allocator.milp.memory_bound import LowerBoundTerm
from qsync_fx.allocator.problem import Problem
from qsync_fx.predictor.replayer.cluster_step import after, before_sending

THOUSANDTHS = 1000.0


@dataclass(frozen=True)
class BackwardSegments:
    """Communication schedule of a device class, equal under all plans.

    Attributes:
        of: segment of the backward pass, by operator index.
        after: seconds from the end of computation and communication to the end of the step.
        slowdown: factor on all times of the device.
        extra: seconds that the device spends to send, by segment.
    """

    of: Sequence[int]
    after: float
    slowdown: float
    extra: Sequence[float]


def backward_segments(problem: Problem, evaluator: PlanEvaluator, name: str) -> BackwardSegments:
    """Return the communication schedule of a class."""
    schedule, graph = evaluator.schedules()[name], problem.classes[name].graph
    device, settings = problem.cluster.devices[name], problem.cluster.compression
    paths = [parameter.path for parameter in schedule.parameters]
    first = len(graph.operators)
    ends: list[int] = []
    for bucket in evaluator.buckets:
        index = [
            schedule.ready[paths[selected]]
            for selected in bucket
            if paths[selected] in schedule.ready
        ]
        first = min([first, *(graph.places[schedule.backward[place].operator] for place in index)])
        ends.append(first)
    # When a bucket is ready, the backward pass has completed all operators from its end on.
    of = (
        len(ends) - np.searchsorted(ends[::-1], np.arange(len(graph.operators)), side="right")
    ).tolist()
    sizes = [
        sum(
            schedule.parameters[selected].numel * schedule.parameters[selected].dtype_bytes
            for selected in bucket
        )
        for bucket in evaluator.buckets
    ]
    extra = [before_sending(device, settings, size) * device.slowdown for size in sizes]
    between = after(schedule.optimizer * device.slowdown, device, sum(sizes))
    return BackwardSegments(of, between, device.slowdown, [*extra, 0.0])


@dataclass(frozen=True)
class DeviceProgram:
    """Variables and expressions of one device class.

    Attributes:
        name: name of the class.
        formats: formats of its operators, as expressions.
        variance: expression of the variance, weighted as in the mean gradient.
        segments: segment times in thousandths of the unit; the first includes the forward pass and
            all transfers. Each sum up to a segment, plus `after`, is a lower bound on the step.
        after: constant time at the end of the step, in thousandths of the unit.
        held: live bytes at each candidate peak; empty if memory does not matter.
    """

    name: str
    formats: Formats
    variance: Expression
    segments: Sequence[Expression]
    after: float
    held: tuple[Expression, ...]

    def ready(self, program: LinearProgram) -> list[int]:
        """Add a variable for the sum up to each segment, and return them."""
        result: list[int] = []
        for segment in self.segments:
            before: Expression = {result[-1]: 1.0} if result else {}
            result.append(program.variable(upper=INFINITY))
            program.row(total((1.0, before), (1.0, segment), (-1.0, {result[-1]: 1.0})), most=0.0)
        return result


def device_program(
    program: LinearProgram,
    problem: Problem,
    evaluator: PlanEvaluator,
    name: str,
    costs: OperatorCosts,
    unit: float,
    live: LowerBoundTerm | None,
    travel: Sequence[Expression],
    later: Sequence[Expression],
) -> DeviceProgram:
    """Add a device class to a program and return its expressions.

    Args:
        program: the program to extend.
        problem: the planning problem.
        evaluator: evaluator of the problem.
        name: name of the class.
        costs: times of operator states.
        unit: seconds that correspond to 1000 units of time in rows.
        live: memory terms; None if memory does not matter.
        travel: transfer time by bucket, in thousandths of the unit.
        later: delay of computation by bucket without slowdown, in thousandths of the unit.
    """
    part, sends = problem.classes[name], backward_segments(problem, evaluator, name)
    formats = Formats(program, part, problem.tied)
    forward: dict[int, float] = {}
    backward: list[dict[int, float]] = [{} for _ in sends.extra]

    def charge(where: Expression, ahead: float, back: float, segment: int) -> None:
        for into, seconds in ((forward, ahead), (backward[segment], back)):
            if seconds:
                for variable, factor in where.items():
                    into[variable] = into.get(variable, 0.0) + factor * seconds

    casts = Casting(program, formats, costs.times, sends.of).charges()
    for item in itertools.chain(costs.charges(program, formats), casts):
        charge(item.where, item.forward, item.backward, sends.of[item.owner])
    outside = costs.times.outside()
    charge(ONE, outside.forward + outside.backward, 0.0, 0)
    scale = THOUSANDTHS / unit
    parts: list[Expression] = []
    for number, (segment, extra) in enumerate(zip(backward, sends.extra, strict=True)):
        ahead: list[tuple[float, Expression]] = []
        if number:
            ahead = [(sends.slowdown, later[number - 1]), (-1.0, travel[number - 1])]
        if number == 0:
            ahead = [(sends.slowdown * scale, forward), *((1.0, item) for item in travel)]
        parts.append(total(*ahead, (sends.slowdown * scale, segment), (scale * extra, ONE)))
    weight = problem.weight(name)
    variance: dict[int, float] = {}
    for operator, available in formats.choices.items():
        for fmt, variable in available.items():
            variance[variable] = variance.get(variable, 0.0) + weight * part.omega(operator, fmt)
    at_peaks = tuple(live.expressions(formats)) if live is not None else ()
    return DeviceProgram(name, formats, variance, parts, scale * sends.after, at_peaks)
