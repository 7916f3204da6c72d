"""The file of a plan that was found from a profile, which lies beside it in the cache.

Invariant: `caches()/profiles/STRUCTURE` holds what was measured of models of one structure: for each machine, batch and mode a profile, and
a file that ends with ".plan.json" with the plan. Reading never fails: a file that is none is none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsync_fx.cached.fingerprint import Fingerprint
from qsync_fx.codec import Schema
from qsync_fx.devices.machine import Machine
from qsync_fx.errors import PlanError
from qsync_fx.files import caches

SUFFIX: Final = ".plan.json"


@dataclass(frozen=True)
class KeptPlan:
    """
    Attributes:
        machine, model: where its profile was measured, and of what.
        within: the format whose variance it stays within.
        seconds: of a step, as foreseen.
        uniform_seconds: of a step with all operators in that format.
        operators: formats by the ids of operators.
    """

    machine: Machine
    model: Fingerprint
    within: str
    seconds: float
    uniform_seconds: float
    operators: dict[str, str]


KEPT: Final = Schema(
    KeptPlan,
    noun="plan of a cached profile",
    error=PlanError,
    remedy="remove it, and save the profile again: Profile.save()",
    name="qsync-cached-plan",
)


def folder(structure: str) -> Path:
    """Returns where profiles of models of a structure are kept; it need not exist."""
    return caches() / "profiles" / structure


def kept(structure: str) -> list[tuple[Path, KeptPlan]]:
    """Returns the plans that are there for models of a structure, the latest first."""
    try:
        files = [(path, path.stat()) for path in folder(structure).glob(f"*{SUFFIX}")]
    except OSError:  # another process has just removed one, or the folder is not ours to read
        return []
    latest = sorted(files, key=lambda file: -file[1].st_mtime_ns)
    read = ((path, _read(path, state.st_mtime_ns, state.st_size)) for path, state in latest)
    return [(path, found) for path, found in read if found is not None]


@functools.lru_cache(maxsize=64)
def _read(path: Path, _written: int, _bytes: int) -> KeptPlan | None:
    try:
        return KEPT.load(path)
    except PlanError:
        return None
