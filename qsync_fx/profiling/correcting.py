"""A profile that is there, corrected by plans that are measured themselves.

Invariant: what the profile holds of other plans stays as it was measured, and it is of the same model, machine, options and optimizer. Of
runs of one plan the latest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qsync_fx.devices.machine import Machine
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.plan import Plan
from qsync_fx.profiling.profile import Model, Profile
from qsync_fx.profiling.runs import Run


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
    """Returns a profile with the runs of another one of the same model, in place of what it held of these plans."""
    new = [_states(run) for run in found.runs]
    kept = [run for run in profile.runs if not (run.planned and _states(run) in new)]
    wider = set(found.graph.formats) - set(profile.graph.formats)
    return replace(profile, stored=found.stored if wider else profile.stored, runs=[*kept, *found.runs])


def _states(run: Run) -> list[tuple[str, str | None, str | None]]:
    return [(measured.operator, measured.precision, measured.output) for measured in run.operators]
