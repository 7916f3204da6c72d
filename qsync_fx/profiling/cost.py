"""What measuring a model will cost, in words, before it is done."""

from __future__ import annotations

from typing import Final

from qsync_fx.profiling.observed import Observed
from qsync_fx.profiling.statistics.indicators.methods import method
from qsync_fx.profiling.statistics.measured import FRACTION, STEPS

_STEPS: Final = 3
"""Steps that a plan runs in its turn."""
_COMPILE: Final = (3.0, 0.2)
"""Seconds that it takes to compile a model, and each operator of it more, where compiled kernels are cached."""


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
        f"measuring {seen.model.name} under {many(plans, 'plan')}: {about} where its kernels were compiled before, "
        "else several times that"
    )


def sensitivity_costs(seen: Observed, sensitivity: str | None, formats: int) -> str:
    """Returns what it takes to find a sensitivity beside; "" for none."""
    if sensitivity is None:
        return ""
    from qsync_fx.report.numbers import many

    passes = method(sensitivity).passes(len(seen.explanation.plan().operators), formats)
    minutes = STEPS * FRACTION * passes * seen.seconds.passes / 60
    most = f"at most {STEPS} steps of about {many(passes, 'pass', 'passes')} for its sensitivity"
    return f"; then {most}, at most about {minutes:.1f} minutes"
