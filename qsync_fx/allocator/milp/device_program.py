"""The program of one class of devices: choices, what they take until each bucket can be sent, and what is held.

The backward pass is cut into stretches, one until each bucket is ready and one behind the last. A bucket is ready after all stretches until
then: a step of T seconds is a bound on that and the bucket's and all later ones' travelling. That is the closed form of the replayer. In
rows that are sparse what a bucket leads to is a variable, the one before it, its stretch, and less of travelling by the bucket before:
`ready`.

Invariant: seconds in rows are in thousandths of `unit`, so that tolerances are relative to a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.allocator.evaluator import PlanEvaluator
from qsync_fx.allocator.milp.cast_terms import Casting
from qsync_fx.allocator.milp.format_variables import Formats, Priced
from qsync_fx.allocator.milp.linear_program import INFINITY, ONE, Expression, LinearProgram, total
from qsync_fx.allocator.milp.memory_bound import LowerBoundTerm
from qsync_fx.allocator.problem import Problem
from qsync_fx.predictor.replayer.cluster_step import after, before_sending

THOUSANDTHS = 1000.0


@dataclass(frozen=True)
class Stretches:
    """How a class of devices sends.

    Attributes:
        of: by operator, the stretch of the backward pass that it is in.
        after: seconds from when all is computed and has arrived to the end of the step.
        slowdown: what everything on the device takes longer than its profile says.
        extra: by stretch, seconds that the device spends to send.
    """

    of: Sequence[int]
    after: float
    slowdown: float
    extra: Sequence[float]


def stretches(problem: Problem, judge: PlanEvaluator, name: str) -> Stretches:
    """Returns how a class sends; it is the same under all plans."""
    schedule, graph = judge.schedules()[name], problem.classes[name].graph
    device, settings = problem.cluster.devices[name], problem.cluster.compression
    paths = [parameter.path for parameter in schedule.parameters]
    first = len(graph.operators)
    ends: list[int] = []
    for bucket in judge.buckets:
        index = [
            schedule.ready[paths[selected]]
            for selected in bucket
            if paths[selected] in schedule.ready
        ]
        first = min([first, *(graph.places[schedule.backward[place].operator] for place in index)])
        ends.append(first)
    # The operators from the end of a bucket's stretch on are through when it is ready.
    of = (
        len(ends) - np.searchsorted(ends[::-1], np.arange(len(graph.operators)), side="right")
    ).tolist()
    sizes = [
        sum(
            schedule.parameters[selected].numel * schedule.parameters[selected].dtype_bytes
            for selected in bucket
        )
        for bucket in judge.buckets
    ]
    extra = [before_sending(device, settings, size) * device.slowdown for size in sizes]
    between = after(schedule.optimizer * device.slowdown, device, sum(sizes))
    return Stretches(of, between, device.slowdown, [*extra, 0.0])


@dataclass(frozen=True)
class DeviceProgram:
    """
    Attributes:
        name: of the class.
        formats: what its operators compute in, as expressions.
        variance: as an expression, weighed as the mean gradient weighs it.
        stretches: of which the sum until one is what a step takes by what is done until then, and travels from then on; the forward pass
            is in the first; as expressions, in thousandths of the unit.
        after: what of the step follows in any case, in the same.
        held: bytes that a step holds at each moment at which it may hold most; none where memory does not matter.
    """

    name: str
    formats: Formats
    variance: Expression
    stretches: Sequence[Expression]
    after: float
    held: tuple[Expression, ...]

    def ready(self, program: LinearProgram) -> list[int]:
        """Adds a variable for the sum until each stretch, and returns them."""
        result: list[int] = []
        for stretch in self.stretches:
            before: Expression = {result[-1]: 1.0} if result else {}
            result.append(program.variable(upper=INFINITY))
            program.row(total((1.0, before), (1.0, stretch), (-1.0, {result[-1]: 1.0})), most=0.0)
        return result


def device_program(
    program: LinearProgram,
    problem: Problem,
    judge: PlanEvaluator,
    name: str,
    prices: Priced,
    unit: float,
    live: LowerBoundTerm | None,
    travel: Sequence[Expression],
    later: Sequence[Expression],
) -> DeviceProgram:
    """Adds a class of devices to a program; `travel` says how long each bucket travels, in thousandths of the unit, and `later` how much
    later a device as fast as its profile says computes for it."""
    part, sends = problem.classes[name], stretches(problem, judge, name)
    formats = Formats(program, part, problem.tied)
    forward: dict[int, float] = {}
    backward: list[dict[int, float]] = [{} for _ in sends.extra]

    def charge(where: Expression, ahead: float, back: float, stretch: int) -> None:
        for into, seconds in ((forward, ahead), (backward[stretch], back)):
            if seconds:
                for variable, factor in where.items():
                    into[variable] = into.get(variable, 0.0) + factor * seconds

    casts = Casting(program, formats, prices.times, sends.of).charges()
    for item in itertools.chain(prices.charges(program, formats), casts):
        charge(item.where, item.forward, item.backward, sends.of[item.owner])
    outside = prices.times.outside()
    charge(ONE, outside.forward + outside.backward, 0.0, 0)
    scale = THOUSANDTHS / unit
    parts: list[Expression] = []
    for number, (stretch, extra) in enumerate(zip(backward, sends.extra, strict=True)):
        ahead: list[tuple[float, Expression]] = []
        if number:
            ahead = [(sends.slowdown, later[number - 1]), (-1.0, travel[number - 1])]
        if number == 0:
            ahead = [(sends.slowdown * scale, forward), *((1.0, item) for item in travel)]
        parts.append(total(*ahead, (sends.slowdown * scale, stretch), (scale * extra, ONE)))
    weight = problem.weight(name)
    variance: dict[int, float] = {}
    for operator, available in formats.choices.items():
        for fmt, variable in available.items():
            variance[variable] = variance.get(variable, 0.0) + weight * part.omega(operator, fmt)
    at_peaks = tuple(live.expressions(formats)) if live is not None else ()
    return DeviceProgram(name, formats, variance, parts, scale * sends.after, at_peaks)
