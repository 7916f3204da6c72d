"""One program of one or several classes of devices, within limits: built, solved, and read as plans.

Of many thousands of operators the relaxed program is solved first. Few of its choices are between formats, one a limit or so, and with the
narrowest of these all limits are kept: a plan that is known to be as near to the best as it is to the relaxed program's.

Invariant: no plan of the program is below the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from qsync_fx.allocator.exact.device_program import THOUSANDTHS, DeviceProgram, device_program
from qsync_fx.allocator.exact.memory import Held
from qsync_fx.allocator.exact.prices import Prices
from qsync_fx.allocator.exact.program import INFINITY, Program, Solved, total
from qsync_fx.allocator.judge import TOLERANCE, Judge
from qsync_fx.allocator.problem import Asked, Plans, Problem, width

LARGE: Final = 8000
"""Choices from which on the relaxed program is solved first."""
_SOME: Final = 1e-6


@dataclass(frozen=True)
class Limits:
    """What a program is held to, as the judge's limits are in its terms.

    Attributes:
        seconds: of a step; None for any.
        memory: by class, bytes that a step may hold.
        variance: of the mean gradient; None for any.
        floor: seconds that a step takes whatever is chosen, for other classes.
    """

    seconds: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    variance: float | None = None
    floor: float = 0.0


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        plans: of the classes; None where there are none.
        value: what was to be small, of these.
        bound: that what was to be small is not below.
        infeasible: whether no plan keeps the limits.
        stopped: whether time ran out.
    """

    plans: Plans | None
    value: float
    bound: float
    infeasible: bool
    stopped: bool


def find(
    problem: Problem,
    judge: Judge,
    prices: Mapping[str, Prices],
    held: Mapping[str, Held],
    limits: Limits,
    least: str,
    names: Sequence[str],
    start: Plans,
    gap: float,
    seconds: float,
) -> Found:
    """Returns the plans of some classes for which something is least: "variance", "seconds", or the "memory" of the one class.

    Args:
        start: plans that the search starts from where they keep the limits.
        gap: that may be left, of what is least.
        seconds: after which the search is given up.
    """
    unit = max(judge.seconds, 1e-12)
    program = Program()
    memory = {name: held[name] for name in names if least == "memory" or name in limits.memory}
    devices = [device_program(program, problem, judge, name, prices[name], unit, memory.get(name)) for name in names]
    _limited(program, devices, limits, unit)
    scale = _minimised(program, devices, limits, least, unit)
    found = _solved(program, devices, start, gap, seconds)
    if found.values is None:
        return Found(None, INFINITY, INFINITY, found.infeasible, found.stopped)
    plans = {device.name: device.formats.asked(found.values.tolist()) for device in devices}
    return Found(plans, found.objective / scale, found.bound / scale, False, found.stopped)


def _limited(program: Program, devices: Sequence[DeviceProgram], limits: Limits, unit: float) -> None:
    for device in devices:
        if limits.seconds is not None:
            most = THOUSANDTHS * limits.seconds / unit * (1 + TOLERANCE / 2)
            for variable, rest in device.ends:
                program.row({variable: 1.0}, most=most - rest)
        if (limit := limits.memory.get(device.name)) is not None:
            for held in device.held:
                program.row(total((THOUSANDTHS / limit, held)), most=THOUSANDTHS * (1 + TOLERANCE / 2))
    if limits.variance is not None:
        variance = total(*((1.0, device.variance) for device in devices))
        size = max([limits.variance, *variance.values()])
        if size > 0:
            most = limits.variance / size * (1 + TOLERANCE / 2)
            program.row(total((THOUSANDTHS / size, variance)), most=THOUSANDTHS * most)


def _minimised(program: Program, devices: Sequence[DeviceProgram], limits: Limits, least: str, unit: float) -> float:
    """Says what is least; returns what the objective is in its own unit."""
    if least == "seconds":
        step = program.variable(1.0, INFINITY)
        for device in devices:
            for variable, rest in device.ends:
                program.row({variable: 1.0, step: -1.0}, most=-rest)
        program.row({step: 1.0}, least=THOUSANDTHS * limits.floor / unit)
        return THOUSANDTHS / unit
    if least == "memory":
        peak = program.variable(1.0, INFINITY)
        size = max((sum(map(abs, held.values())) for device in devices for held in device.held), default=1.0) or 1.0
        for device in devices:
            for held in device.held:
                program.row(total((THOUSANDTHS / size, held), (-1.0, {peak: 1.0})), most=0.0)
        return THOUSANDTHS / size
    costs = total(*((1.0, device.variance) for device in devices))
    size = max(costs.values(), default=0.0) or 1.0
    scale = THOUSANDTHS / size
    for variable, factor in costs.items():
        if variable >= 0:
            program.costs[variable] += scale * factor
    return scale


def _solved(program: Program, devices: Sequence[DeviceProgram], start: Plans, gap: float, seconds: float) -> Solved:
    first = {variable: one for device in devices for variable, one in _chosen(device, start[device.name]).items()}
    if sum(program.whole) < LARGE:
        return program.solve(gap, seconds, first)
    relaxed = program.solve(gap, seconds, relaxed=True)
    if relaxed.values is None:
        return relaxed
    rounded = {
        variable: one for device in devices for variable, one in _rounded(device, relaxed.values.tolist()).items()
    }
    found = program.solve(gap, seconds, relaxed=True, fixed=rounded)
    if found.values is not None:
        if found.objective - relaxed.bound <= gap * abs(found.objective):
            return Solved(found.values, found.objective, relaxed.bound)
        first = rounded
    better = program.solve(gap, seconds, first)
    if better.values is None and found.values is not None:
        return Solved(found.values, found.objective, relaxed.bound, stopped=True)
    return better


def _chosen(device: DeviceProgram, asked: Asked) -> dict[int, float]:
    return {
        variable: float(fmt == asked[operator])
        for operator, known in device.formats.choices.items()
        for fmt, variable in known.items()
    }


def _rounded(device: DeviceProgram, values: Sequence[float]) -> dict[int, float]:
    narrowest = {
        operator: min((fmt for fmt in known if values[known[fmt]] > _SOME), key=width)
        for operator, known in device.formats.choices.items()
    }
    return _chosen(device, narrowest)
