"""The program of one class of devices: choices, what they take until each bucket can be sent, and what is held.

The backward pass is cut into stretches, one until each bucket is ready and one behind the last. When a bucket is ready is a variable: the
one before it and its stretch. So a step of T seconds is a bound on each of them, the bucket's and all later ones' travelling subtracted:
the closed form of the replayer, in rows that are sparse.

Invariant: seconds in rows are in thousandths of `unit`, so that tolerances are relative to a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.allocator.exact.casting import Casting
from qsync_fx.allocator.exact.formats import Formats
from qsync_fx.allocator.exact.memory import Held
from qsync_fx.allocator.exact.prices import Prices
from qsync_fx.allocator.exact.program import INFINITY, ONE, Expression, Program, total
from qsync_fx.allocator.judge import Judge
from qsync_fx.allocator.problem import Problem

THOUSANDTHS = 1000.0


@dataclass(frozen=True)
class Stretches:
    """How a class of devices sends.

    Attributes:
        of: by operator, the stretch of the backward pass that it is in.
        after: by stretch, seconds from its end to the end of the step, of which no plan is the cause.
        slowdown: what everything on the device takes longer than its profile says.
        extra: by stretch, seconds that the device spends to send.
    """

    of: Sequence[int]
    after: Sequence[float]
    slowdown: float
    extra: Sequence[float]


def stretches(problem: Problem, judge: Judge, name: str) -> Stretches:
    """Returns how a class sends; it is the same under all plans."""
    schedule, graph = judge.schedules()[name], problem.classes[name].graph
    device, how = problem.cluster.devices[name], problem.cluster.compression
    paths = [parameter.path for parameter in schedule.parameters]
    first = len(graph.operators)
    ends: list[int] = []
    for bucket in judge.buckets:
        at = [schedule.ready[paths[which]] for which in bucket if paths[which] in schedule.ready]
        first = min([first, *(graph.places[schedule.backward[place].operator] for place in at)])
        ends.append(first)
    # The operators from the end of a bucket's stretch on are through when it is ready.
    of = [len(ends) - int(np.searchsorted(ends[::-1], at, side="right")) for at in range(len(graph.operators))]
    sizes = [
        sum(schedule.parameters[which].numel * schedule.parameters[which].dtype_bytes for which in bucket)
        for bucket in judge.buckets
    ]
    extra = [0.0 if how is None else how.fixed + how.each * size for size in sizes]
    rest = np.cumsum(np.array(judge.transfer, float)[::-1])[::-1].tolist()
    between = schedule.optimizer * device.slowdown + device.delay
    return Stretches(of, [*(between + travel for travel in rest), between], device.slowdown, [*extra, 0.0])


@dataclass(frozen=True)
class DeviceProgram:
    """
    Attributes:
        name: of the class.
        formats: what its operators compute in, as expressions.
        variance: as an expression, weighed as the mean gradient weighs it.
        ends: by stretch, the variable of when it ends, and what of the step follows, both in thousandths of the unit.
        held: bytes that a step holds at each moment at which it may hold most; none where memory does not matter.
    """

    name: str
    formats: Formats
    variance: Expression
    ends: list[tuple[int, float]]
    held: tuple[Expression, ...]


def device_program(
    program: Program, problem: Problem, judge: Judge, name: str, prices: Prices, unit: float, held: Held | None
) -> DeviceProgram:
    """Adds a class of devices to a program."""
    part, sends = problem.classes[name], stretches(problem, judge, name)
    formats = Formats(program, part, problem.tied)
    forward: dict[int, float] = {}
    backward: list[dict[int, float]] = [{} for _ in sends.after]

    def charge(where: Expression, ahead: float, back: float, stretch: int) -> None:
        for into, seconds in ((forward, ahead), (backward[stretch], back)):
            if seconds:
                for variable, factor in where.items():
                    into[variable] = into.get(variable, 0.0) + factor * seconds

    for at, states in enumerate(formats.states):
        for state, where in states.items():
            taken = prices.operator(at, state)
            charge(where, taken.forward, taken.backward, sends.of[at])
    for cast in Casting(program, formats, prices.times, sends.of).charges():
        charge(cast.where, cast.forward, cast.backward, sends.of[cast.owner])
    outside = prices.times.outside()
    charge(ONE, outside.forward + outside.backward, 0.0, 0)
    scale = THOUSANDTHS / unit
    ends: list[tuple[int, float]] = []
    ready: Expression = total((sends.slowdown * scale, forward))
    for stretch, extra, rest in zip(backward, sends.extra, sends.after, strict=True):
        variable = program.variable(upper=INFINITY)
        now = total((1.0, ready), (sends.slowdown * scale, stretch), (scale * extra, ONE), (-1.0, {variable: 1.0}))
        program.row(now, most=0.0)
        ready = {variable: 1.0}
        ends.append((variable, scale * rest))
    weight = problem.weight(name)
    variance: dict[int, float] = {}
    for operator, known in formats.choices.items():
        for fmt, variable in known.items():
            variance[variable] = variance.get(variable, 0.0) + weight * part.omega(operator, fmt)
    at_peaks = tuple(held.expressions(formats)) if held is not None else ()
    return DeviceProgram(name, formats, variance, ends, at_peaks)
