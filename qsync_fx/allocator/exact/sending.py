"""How long buckets of gradients travel in a program, where their codecs are chosen with the formats of operators.

A bucket has one codec. Where one of them is coded all go through our exchange, which costs those in FP32 a copy: one variable says whether.

Invariant: with codecs given, seconds and variance are those of `coding.Options`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from qsync_fx.allocator.coding import Codecs, Options
from qsync_fx.allocator.exact.device_program import THOUSANDTHS
from qsync_fx.allocator.exact.linear.program import CONSTANT, Expression, Program, total
from qsync_fx.allocator.judging.judge import Judge
from qsync_fx.allocator.problem import Problem
from qsync_fx.communication.codecs import PLAIN


@dataclass(frozen=True)
class Sending:
    """
    Attributes:
        travel: by bucket, seconds in thousandths of the unit.
        beside: the same of what devices, as fast as their profiles say, compute later for it.
        variance: that codecs add to that of the mean gradient.
        choices: by bucket, the variable of each codec; empty where there is nothing to choose.
        coded: the variable that says whether any bucket is coded; None where there is nothing to choose.
    """

    travel: Sequence[Expression]
    beside: Sequence[Expression]
    variance: Expression
    choices: Sequence[Mapping[str, int]] = ()
    coded: int | None = None

    def start(self, codecs: Codecs) -> dict[int, float]:
        """Returns values of whole variables under a choice."""
        found = {
            variable: float(name == codec)
            for by, codec in zip(self.choices, codecs, strict=True)
            for name, variable in by.items()
        }
        if self.coded is not None:
            found[self.coded] = float(any(codec != PLAIN.name for codec in codecs))
        return found

    def chosen(self, values: Sequence[float]) -> Codecs:
        """Returns the codec of each bucket in a solution."""
        return tuple(max(by, key=lambda name: values[by[name]]) for by in self.choices)


def sending(program: Program, options: Options, unit: float) -> Sending:
    """Adds what there is to choose of codecs to a program."""
    scale = THOUSANDTHS / unit
    if not options.open:
        known = [[{CONSTANT: scale * seconds} for seconds in one] for one in (options.alone, options.alone_beside)]
        return Sending(known[0], known[1], {})
    any_coded = program.variable(whole=True)
    choices: list[dict[str, int]] = []
    travel: list[Expression] = []
    beside: list[Expression] = []
    variance: dict[int, float] = {}
    each = zip(options.alone, options.alone_beside, options.seconds, options.beside, options.variance, strict=True)
    for alone, alone_beside, seconds, later, adds in each:
        by = {codec: program.variable(whole=True) for codec in seconds}
        program.row(dict.fromkeys(by.values(), 1.0), least=1.0, most=1.0)
        narrow = {codec: variable for codec, variable in by.items() if codec != PLAIN.name}
        program.row({**dict.fromkeys(narrow.values(), 1.0), any_coded: -1.0}, most=0.0)
        for into, plain, coded in ((travel, alone, seconds), (beside, alone_beside, later)):
            exchanged = coded[PLAIN.name]
            terms = {variable: scale * (coded[codec] - exchanged) for codec, variable in narrow.items()}
            into.append({CONSTANT: scale * plain, any_coded: scale * (exchanged - plain), **terms})
        variance |= {variable: adds[codec] for codec, variable in narrow.items()}
        choices.append(by)
    program.row({**dict.fromkeys(variance, -1.0), any_coded: 1.0}, most=0.0)
    return Sending(travel, beside, variance, choices, any_coded)


def kept(problem: Problem, judge: Judge, found: Sending, unit: float) -> Iterator[Expression]:
    """Yields what steps take by each bucket of the classes that are not open to choice, in thousandths of the unit."""
    scale = THOUSANDTHS / unit
    for name, part in problem.classes.items():
        if part.kept is None:
            continue
        fleet = judge.timeline.played
        device = fleet.devices[name]
        slowdown = problem.cluster.devices[name].slowdown
        # What the device does beside buckets that travel follows their codecs; all else is the same under all of them.
        known = slowdown * np.cumsum([0.0, *judge.computed_later])
        ends = np.append(device.ready, device.computed) - known + fleet.after(name)
        for at, end in enumerate(ends.tolist()):
            sent = [(slowdown, one) for one in found.beside[:at]]
            yield total((1.0, {CONSTANT: scale * end}), *sent, *((1.0, one) for one in found.travel[at:]))
