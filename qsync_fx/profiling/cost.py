"""What measuring a model will cost, in words, before it is done, and what is left of it meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from qsync_fx.profiling.gradients.sending import PLANS
from qsync_fx.profiling.gradients.together import planned_seconds
from qsync_fx.profiling.observed import Observed
from qsync_fx.profiling.statistics.indicators.methods import method
from qsync_fx.profiling.statistics.measured import FRACTION, STEPS
from qsync_fx.profiling.statistics.settling import LEAST

_TURN: Final = 3
"""Steps that a plan runs in its turn, and around its compilation."""
_KNOWN: Final = (1.0, 0.015)
"""Seconds that it takes to compile a model, and each operator of it more, where its graphs are in torch's caches."""
_NEW: Final = (5.0, 0.2)
"""The same where they are not: most of it compilers of C++ take, for kernels that are not alike. On two cores a BERT-base of 302 operators
took 45 s a plan, and a ResNet-18 of 69 some 40 s of the processor's."""


def costs(seen: Observed, plans: int, rounds: int) -> str:
    """Returns what it takes to measure a model under so many plans, in so many turns each."""
    from qsync_fx.report.numbers import many

    steps = plans * (rounds * _TURN + 3)
    what = f"measuring {seen.model.name} under {many(plans, 'plan')}: {many(plans, 'compilation')} and {steps} steps"
    return f"{what}, {_about(seen, plans, steps * _step(seen))}"


def sensitivity_costs(seen: Observed, sensitivity: str | None, formats: int) -> str:
    """Returns what it takes to find a sensitivity beside; "" for none."""
    if sensitivity is None:
        return ""
    from qsync_fx.report.numbers import many, roughly

    passes = method(sensitivity).passes(len(seen.explanation.plan().operators), formats)
    least, most = (roughly(steps * FRACTION * passes * seen.seconds.passes) for steps in (LEAST, STEPS))
    steps = f"{LEAST} to {STEPS} steps of about {many(passes, 'pass', 'passes')} for its sensitivity"
    return f"; then {steps}, {least} to {most}, until it is known well enough"


def sending_costs(seen: Observed, ranks: int) -> str:
    """Returns what it takes to find what sending gradients takes of a step; "" where one rank is alone."""
    if ranks == 1:
        return ""
    steps = PLANS * planned_seconds(_step(seen))
    return f"; then steps of all {ranks} ranks together under {PLANS} plans, {_about(seen, PLANS, steps)}"


class Left:
    """What is left of a measurement, by how long its parts took; each of both lists grows as they are done.

    Args:
        seen: the model.
        plans, rounds: how many plans are compiled, and how many turns each has then.
    """

    def __init__(self, seen: Observed, plans: int, rounds: int) -> None:
        self._plans, self._turns, self._turn = plans, plans * rounds, _TURN * _step(seen)
        self.compiled: list[float] = []
        self.turned: list[float] = []

    @property
    def seconds(self) -> float:
        """Seconds that all plans take that are not compiled, and all turns that have not been. The first plan has compilers start."""
        each = _mean(self.compiled[1:] or self.compiled, 0.0)
        turns = (self._turns - len(self.turned)) * _mean(self.turned, self._turn)
        return (self._plans - len(self.compiled)) * each + turns


def _mean(seconds: Sequence[float], unknown: float) -> float:
    return statistics.fmean(seconds) if seconds else unknown


def _about(seen: Observed, plans: int, steps: float) -> str:
    """Returns in words what it takes to compile the model under so many plans, and steps that take so many seconds."""
    from qsync_fx.report.numbers import roughly

    operators = len(seen.explanation.operators)
    known, new = (roughly(plans * (fixed + each * operators) + steps) for fixed, each in (_KNOWN, _NEW))
    return f"about {known} where torch's caches hold what is compiled, {new} where not"


def _step(seen: Observed) -> float:
    return seen.seconds.passes + seen.seconds.optimizer
