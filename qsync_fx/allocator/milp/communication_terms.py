"""Transfer of gradient buckets and the choice of their codecs, as linear expressions.

If any bucket is coded, all buckets go through the all-reduce of qsync_fx, in which FP32 buckets
cost a copy; one binary variable states this. With fixed codecs, seconds and variance equal the
values in `CodecOptions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from qsync_fx.allocator.codec_choice import CodecOptions, Codecs
from qsync_fx.allocator.evaluator import PlanEvaluator
from qsync_fx.allocator.milp.linear_program import CONSTANT, Expression, LinearProgram, total
from qsync_fx.allocator.problem import Problem
from qsync_fx.communication.codecs import PLAIN

THOUSANDTHS: Final = 1000.0
"""Times in rows are in thousandths of a unit of about one step, so that tolerances are relative."""


@dataclass(frozen=True)
class CommunicationTerms:
    """Expressions of the transfer of gradient buckets, in thousandths of the unit.

    `delays` are delays of computation by bucket, without slowdown. Without a choice of codecs there
    are no `choices`. The variable `coded` is 1 if any bucket is coded.
    """

    travel: Sequence[Expression]
    delays: Sequence[Expression]
    variance: Expression
    choices: Sequence[Mapping[str, int]] = ()
    coded: int | None = None

    def start(self, codecs: Codecs) -> dict[int, float]:
        """Return the values of the integer variables for a codec choice."""
        if self.coded is None:
            return {}
        result = {self.coded: float(any(codec != PLAIN.name for codec in codecs))}
        for by, codec in zip(self.choices, codecs, strict=True):
            result |= {variable: float(name == codec) for name, variable in by.items()}
        return result

    def chosen(self, values: Sequence[float]) -> Codecs | None:
        """Return the codec of each bucket in a solution; None if there is no choice."""
        if self.coded is None:
            return None
        return tuple(max(by, key=lambda name: values[by[name]]) for by in self.choices)


def sending(program: LinearProgram, options: CodecOptions, unit: float) -> CommunicationTerms:
    """Add the codec choice to a program."""
    scale = THOUSANDTHS / unit
    if not options.open:
        travel, delays = (
            [{CONSTANT: scale * seconds} for seconds in item]
            for item in (options.alone, options.alone_delays)
        )
        return CommunicationTerms(travel, delays, {})
    any_coded = program.variable(full=True)
    choices: list[dict[str, int]] = []
    variance: dict[int, float] = {}
    for adds in options.variance:
        by = {codec: program.variable(full=True) for codec in adds}
        narrow = [variable for codec, variable in by.items() if codec != PLAIN.name]
        program.row(dict.fromkeys(by.values(), 1.0), least=1.0, most=1.0)
        program.row({**dict.fromkeys(narrow, 1.0), any_coded: -1.0}, most=0.0)
        variance |= {by[codec]: adds[codec] for codec in by if codec != PLAIN.name}
        choices.append(by)
    program.row({**dict.fromkeys(variance, -1.0), any_coded: 1.0}, most=0.0)

    def by_bucket(
        alone: Sequence[float], coded: Sequence[Mapping[str, float]]
    ) -> list[dict[int, float]]:
        result = []
        for plain, seconds, by in zip(alone, coded, choices, strict=True):
            copied = seconds[PLAIN.name]
            terms = {by[codec]: scale * (seconds[codec] - copied) for codec in by}
            del terms[by[PLAIN.name]]
            result.append({CONSTANT: scale * plain, any_coded: scale * (copied - plain), **terms})
        return result

    travel = by_bucket(options.alone, options.seconds)
    delays = by_bucket(options.alone_delays, options.delays)
    return CommunicationTerms(travel, delays, variance, choices, any_coded)


def fixed_plan_seconds(
    problem: Problem, evaluator: PlanEvaluator, sends: CommunicationTerms, unit: float
) -> Iterator[Expression]:
    """Yield step times by bucket of the classes with a fixed plan, in thousandths of the unit."""
    scale, fleet = THOUSANDTHS / unit, evaluator.timeline.played
    for name, part in problem.classes.items():
        if part.fixed_plan is None:
            continue
        device, slowdown = fleet.devices[name], problem.cluster.devices[name].slowdown
        # Only the delay by transfers depends on the codecs; all other times are constant.
        delays = slowdown * np.cumsum([0.0, *evaluator.computed_later])
        ends = np.append(device.ready, device.computed) - delays + fleet.after(name)
        for index, end in enumerate(ends.tolist()):
            delayed = [(slowdown, item) for item in sends.delays[:index]]
            sent = [(1.0, item) for item in sends.travel[index:]]
            yield total((1.0, {CONSTANT: scale * end}), *delayed, *sent)
