"""The program of one class of devices: choices, what they take until each bucket can be sent, and what is held.

The backward pass is cut into stretches, one until each bucket is ready and one behind the last. A bucket is ready after all stretches until
then: a step of T seconds is a bound on that, the bucket's and all later ones' travelling subtracted. That is the closed form of the
replayer. In rows that are sparse when a bucket is ready is a variable, the one before it and its stretch: `ready`.

Invariant: seconds in rows are in thousandths of `unit`, so that tolerances are relative to a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.allocator.exact.casting import Casting
from qsync_fx.allocator.exact.certain import Holds
from qsync_fx.allocator.exact.formats import Formats
from qsync_fx.allocator.exact.prices import Priced
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
        stretches: seconds of each, those of the forward pass in the first, as expressions, in thousandths of the unit.
        after: by stretch, what of the step follows it, in the same.
        held: bytes that a step holds at each moment at which it may hold most; none where memory does not matter.
    """

    name: str
    formats: Formats
    variance: Expression
    stretches: Sequence[Expression]
    after: Sequence[float]
    held: tuple[Expression, ...]

    def ready(self, program: Program) -> list[int]:
        """Adds a variable for the end of each stretch, and returns them."""
        found: list[int] = []
        for stretch in self.stretches:
            before: Expression = {found[-1]: 1.0} if found else {}
            found.append(program.variable(upper=INFINITY))
            program.row(total((1.0, before), (1.0, stretch), (-1.0, {found[-1]: 1.0})), most=0.0)
        return found


def device_program(
    program: Program, problem: Problem, judge: Judge, name: str, prices: Priced, unit: float, held: Holds | None
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
    parts: list[Expression] = []
    for number, (stretch, extra) in enumerate(zip(backward, sends.extra, strict=True)):
        ahead = [(sends.slowdown * scale, forward)] if number == 0 else []
        parts.append(total(*ahead, (sends.slowdown * scale, stretch), (scale * extra, ONE)))
    weight = problem.weight(name)
    variance: dict[int, float] = {}
    for operator, known in formats.choices.items():
        for fmt, variable in known.items():
            variance[variable] = variance.get(variable, 0.0) + weight * part.omega(operator, fmt)
    at_peaks = tuple(held.expressions(formats)) if held is not None else ()
    return DeviceProgram(name, formats, variance, parts, [scale * rest for rest in sends.after], at_peaks)
