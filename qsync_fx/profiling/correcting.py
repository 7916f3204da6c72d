"""A profile that is there, corrected by plans that are measured themselves.

Machines are faster at one time than at another: others use them, or it is their clocks and heat. So the first plan of the profile runs in
turns with those that correct it, and what they took is put as if the machine were as fast as it was then, where it differs by more than
chance. Where a plan is that first one, it says itself how fast the machine is now, and nothing else.

Invariant: what the profile holds of other plans stays as it was measured, and it is of the same model, machine, options and optimizer. Of
runs of one plan the latest counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from qsync_fx.devices.machine import Machine
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.explanation import Explanation
from qsync_fx.plan import Plan
from qsync_fx.profiling.profile import Model, Profile
from qsync_fx.profiling.profile_plans import States, add
from qsync_fx.profiling.runs import Run

_CHANCE: Final = 0.02
"""By how much, of it, steps differ by chance at least, where too few were measured to know."""
_OF_MEDIAN: Final = 1.86
"""The standard error of a median of normal numbers, by the median of how far they lie from it and the root of their count."""


def check_asked(plans: Sequence[Plan], precisions: object) -> None:
    """Raises `OptionError` where nothing is asked for that would correct a profile, or more than can be added to one."""
    if not plans:
        do = "give the plan that is to be measured, or leave the profile out to measure the model anew"
        raise OptionError("a profile is corrected by plans, and there is none", where="plan", do=do)
    if precisions is not None:
        do = "leave them out, or leave the profile out to measure the model anew"
        raise OptionError("a profile that is corrected keeps its precisions", where="precisions", do=do)


def check_same(profile: Profile, machine: Machine, model: Model, optimizer: str) -> None:
    """Raises `ProfileError` where a profile is of something else than what is at hand."""
    profile.machine.check(machine)
    profile.model.check(model)
    if profile.optimizer != optimizer:
        with_, now = (f"the optimizer {name}" if name else "no optimizer" for name in (profile.optimizer, optimizer))
        raise ProfileError(f"it was taken with {with_}, and this is with {now}", where="optimizer", do="give the same")


def corrected(profile: Profile, found: Profile) -> Profile:
    """Returns a profile with the runs of another one of the same model that are of the user's plans, in place of what it held of these.

    What the loss takes stays, too, but where it was not known.
    """
    then = profile.runs[0]
    beside = next((run for run in found.runs if not run.planned or _states(run) == _states(then)), None)
    pace = 1.0 if beside is None else _pace(then, beside)
    runs = [run.at_pace(pace) for run in found.runs if run.planned]
    new = [_states(run) for run in runs]
    kept = [run for run in profile.runs if not (run.planned and _states(run) in new)]
    wider = set(found.graph.formats) - set(profile.graph.formats)
    loss = found.loss_memory if profile.loss_memory is None else profile.loss_memory
    return replace(profile, stored=found.stored if wider else profile.stored, runs=[*kept, *runs], loss_memory=loss)


def again(profile: Profile, explanation: Explanation, asked: Mapping[str, Plan]) -> dict[str, tuple[Plan, States]]:
    """Returns the plans that are to run to correct a profile: the user's, by their labels, and the first that the profile has."""
    found: dict[str, tuple[Plan, States]] = {}
    for label, plan in asked.items():
        add(found, label, plan, explanation)
    add(found, profile.runs[0].label, Plan.uniform(profile.precisions[0]), explanation)
    return found


def _pace(then: Run, now: Run) -> float:
    """Returns how fast the machine is now, of what it was; 1 where both differ by chance."""
    pace = then.passes / now.passes
    return pace if abs(pace - 1) > math.hypot(_uncertain(then), _uncertain(now)) else 1.0


def _uncertain(run: Run) -> float:
    """Returns the standard error of what a run's passes take, as a share of it."""
    return _OF_MEDIAN * max(_CHANCE, run.spread) / math.sqrt(len(run.steps))


def _states(run: Run) -> list[tuple[str, str | None, str | None]]:
    return [(measured.operator, measured.precision, measured.output) for measured in run.operators]
