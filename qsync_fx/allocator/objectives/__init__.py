"""Planning objectives, by name: `objective_named` returns one, `NAMES` lists them.

`Objective` (objective.py) is the interface. Each module that implements objectives defines
`OBJECTIVES`, a tuple of them; a new objective is a new module (docs/howto-objective.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qsync_fx.allocator.objectives.objective import Objective
from qsync_fx.entry_points import listed_in_modules
from qsync_fx.errors import PlanError, nearest, shown

__all__ = ["NAMES", "Objective", "objective_named"]


_OBJECTIVES: Final[Mapping[str, Objective]] = listed_in_modules(__name__, "OBJECTIVES")
NAMES: Final = tuple(_OBJECTIVES)


def objective_named(name: str) -> Objective:
    """Return the objective of this name; raise `PlanError` if it is unknown."""
    if name not in _OBJECTIVES:
        raise PlanError(f"there is no objective {shown(str(name))}", do=nearest(str(name), NAMES))
    return _OBJECTIVES[name]
