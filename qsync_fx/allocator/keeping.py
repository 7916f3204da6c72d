"""A profile in the cache, with the plan that its model trains under from then on where none is asked for.

Invariant: the plan is written after the profile that it was found from, so that a plan that is there has one.
"""

from __future__ import annotations

import hashlib
import pathlib
from typing import TYPE_CHECKING

import torch

from qsync_fx.allocator.finding import find_plan
from qsync_fx.allocator.judging.judge import judged
from qsync_fx.cached.kept import KEPT, SUFFIX, KeptPlan, folder
from qsync_fx.devices import default_precision
from qsync_fx.devices.machine import here_for
from qsync_fx.errors import ProfileError

if TYPE_CHECKING:
    from qsync_fx.profiling.profile import Profile


def keep(profile: Profile) -> pathlib.Path:
    """Writes a profile and its plan to the cache, and returns the path of the profile.

    Raises:
        ProfileError: it is of another machine or of the catalog, holds no sensitivity, or cannot be written.
        PlanError: it holds no format that a plan could be within.
    """
    profile.machine.check(here_for(profile.machine))
    model = profile.fingerprint
    if model is None:
        do = "measure the model with qsync_fx.measure, and save that"
        raise ProfileError("the profile does not say by what its model is known when it is compiled", do=do)
    within = default_precision(torch.device(profile.machine.device)).name
    answer = find_plan(profile, objective="fastest", budget=within)
    (name,) = answer.plans
    uniform = judged(answer.problem, answer.problem.uniform(within))
    operators = dict(answer.plans[name])
    found = KeptPlan(profile.machine, model, within, answer.judged.seconds, uniform.seconds, operators)
    path = folder(model.structure) / f"{_name(profile)}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the profile is not saved: {error.strerror or error}"
        do = "set QSYNC_CACHE_DIR to a folder that is writable, or give a path"
        raise ProfileError(what, where=str(path.parent), do=do) from error
    profile.save(path)
    KEPT.write(path.with_suffix(SUFFIX), KEPT.encode(found))
    return path


def _name(profile: Profile) -> str:
    """Returns what the profile is called, as is any other of this model in this mode, with this batch and on this machine."""
    return hashlib.sha256(f"{profile.model.digest} {profile.machine}".encode()).hexdigest()[:16]
