"""Program of one device class: format choices, time per segment, live memory.

The backward pass is divided into segments, one up to the readiness of each gradient bucket and one
after the last. A step is at least as long as all segments up to a bucket plus the transfer of this
and all later buckets; this is the closed form of the replayer. Each segment expression subtracts
the transfer of the previous bucket, so that `DeviceProgram.ready` needs only sparse rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qsync_fx.allocator.evaluator import PlanEvaluator
from qsync_fx.allocator.milp.cast_terms import Casting
from qsync_fx.allocator.milp.communication_terms import THOUSANDTHS, CommunicationTerms
from qsync_fx.allocator.milp.format_variables import Formats, Indicators, OperatorCosts
from qsync_fx.allocator.milp.linear_program import (
    INFINITY,
    ONE,
    Expression,
    LinearProgram,
    add,
    total,
)
from qsync_fx.allocator.problem import Problem
from qsync_fx.predictor.replayer.cluster_step import after, before_sending


class MemoryTerms(Protocol):
    """Live bytes of a step as modelled by a program."""

    def expressions(self, formats: Indicators) -> Iterable[Expression]:
        """Return the live bytes at each candidate peak."""


@dataclass(frozen=True)
class BackwardSegments:
    """Communication schedule of a device class, equal under all plans.

    `of` is the segment by operator index, `extra` the seconds to send by segment, and `after` the
    seconds from the end of computation and communication to the end of the step.
    """

    of: Sequence[int]
    after: float
    slowdown: float
    extra: Sequence[float]


def backward_segments(problem: Problem, evaluator: PlanEvaluator, name: str) -> BackwardSegments:
    """Return the communication schedule of a class."""
    schedule, graph = evaluator.schedules()[name], problem.classes[name].graph
    device, settings = problem.cluster.devices[name], problem.cluster.compression
    first = len(graph.operators)
    ends: list[int] = []
    sizes: list[int] = []
    for bucket in evaluator.buckets:
        parameters = [schedule.parameters[index] for index in bucket]
        ready = [schedule.ready[p.path] for p in parameters if p.path in schedule.ready]
        operators = [graph.places[schedule.backward[index].operator] for index in ready]
        first = min([first, *operators])
        ends.append(first)
        sizes.append(sum(parameter.numel * parameter.dtype_bytes for parameter in parameters))
    # When a bucket is ready, the backward pass has completed all operators from its end on.
    completed = np.searchsorted(ends[::-1], np.arange(len(graph.operators)), side="right")
    extra = [before_sending(device, settings, size) * device.slowdown for size in sizes]
    optimizer = problem.classes[name].times.optimizer()
    end = after(optimizer * device.slowdown, device, sum(sizes))
    segments = (len(ends) - completed).tolist()
    return BackwardSegments(segments, end, device.slowdown, [*extra, 0.0])


@dataclass(frozen=True)
class DeviceProgram:
    """Variables and expressions of one device class; times are in thousandths of the unit.

    The first segment includes the forward pass and all transfers. Each sum up to a segment, plus
    the constant `after`, is a lower bound on the step. `live` has the bytes of candidate peaks.
    """

    name: str
    formats: Formats
    variance: Expression
    segments: Sequence[Expression]
    after: float
    live: Sequence[Expression]

    def ready(self, program: LinearProgram) -> list[int]:
        """Add a variable for the sum up to each segment, and return them."""
        result: list[int] = []
        for segment in self.segments:
            before: Expression = dict.fromkeys(result[-1:], 1.0)
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
    memory: MemoryTerms | None,
    communication: CommunicationTerms,
) -> DeviceProgram:
    """Add a device class to a program and return its expressions.

    `unit` is in seconds and corresponds to 1000 in rows. `memory` is None if it does not matter.
    """
    part, sends = problem.classes[name], backward_segments(problem, evaluator, name)
    formats = Formats(program, part, problem.tied)
    scale = THOUSANDTHS / unit
    computing = sends.slowdown * scale
    outside = costs.times.outside()
    segments: list[dict[int, float]] = [total((scale * extra, ONE)) for extra in sends.extra]
    for travel, delay, later in zip(
        communication.travel, communication.delays, segments[1:], strict=True
    ):
        add(segments[0], travel, 1.0)
        add(later, delay, sends.slowdown)
        add(later, travel, -1.0)
    add(segments[0], ONE, computing * (outside.forward + outside.backward))
    casts = Casting(program, formats, costs.times, sends.of).charges()
    for item in itertools.chain(costs.charges(program, formats), casts):
        add(segments[0], item.where, computing * item.forward)
        add(segments[sends.of[item.owner]], item.where, computing * item.backward)
    weight, variance = problem.weight(name), dict[int, float]()
    for operator, by in formats.choices.items():
        for fmt, variable in by.items():
            add(variance, {variable: 1.0}, weight * part.omega(operator, fmt))
    live = tuple(memory.expressions(formats)) if memory is not None else ()
    return DeviceProgram(name, formats, variance, segments, scale * sends.after, live)
