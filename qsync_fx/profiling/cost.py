"""What measuring a model will cost, in words, before it is done."""

from __future__ import annotations

from typing import Final

from qsync_fx.profiling.observed import Observed
from qsync_fx.profiling.statistics.indicators.methods import method
from qsync_fx.profiling.statistics.measured import FRACTION, STEPS
from qsync_fx.profiling.statistics.settling import LEAST

_STEPS: Final = 3
"""Steps that a plan runs in its turn."""
_COMPILE: Final = (1.0, 0.015)
"""Seconds that it takes to compile a model, and each operator of it more, where its graphs are in torch's caches."""


def costs(seen: Observed, plans: int, rounds: int) -> str:
    """Returns what it takes to measure a model under so many plans, in so many turns each."""
    from qsync_fx.report.numbers import many

    steps = plans * (rounds * _STEPS + 3)
    fixed, each = _COMPILE
    seconds = plans * (fixed + each * len(seen.explanation.operators)) + steps * (
        seen.seconds.passes + seen.seconds.optimizer
    )
    about = f"{many(plans, 'compilation')} and {steps} steps, about {seconds / 60:.1f} minutes"
    return (
        f"measuring {seen.model.name} under {many(plans, 'plan')}: {about} where it was measured before, else several "
        "times that"
    )


def sensitivity_costs(seen: Observed, sensitivity: str | None, formats: int) -> str:
    """Returns what it takes to find a sensitivity beside; "" for none."""
    if sensitivity is None:
        return ""
    from qsync_fx.report.numbers import many

    passes = method(sensitivity).passes(len(seen.explanation.plan().operators), formats)
    each = FRACTION * passes * seen.seconds.passes / 60
    steps = f"{LEAST} to {STEPS} steps of about {many(passes, 'pass', 'passes')} for its sensitivity"
    return f"; then {steps}, {LEAST * each:.1f} to {STEPS * each:.1f} minutes, until it is known well enough"
