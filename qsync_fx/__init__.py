"""qsync_fx: data-parallel training over mixed GPUs, with just as many operators in low precision as are needed.

Four things to do: compile (`torch.compile(model, backend="qsync")`), inspect (`explain`), see what of it runs (`applied`), write a pass
(`graph_pass`).

Invariant: importing this costs nothing but torch; each name is imported when it is first used (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qsync_fx import devices as devices, distributed as distributed, optim as optim
    from qsync_fx.allocator.finding import find_plan as find_plan
    from qsync_fx.errors import (
        DeviceError as DeviceError,
        OptionError as OptionError,
        PassError as PassError,
        PlanError as PlanError,
        PlanWarning as PlanWarning,
        PrecisionError as PrecisionError,
        ProfileError as ProfileError,
        QSyncError as QSyncError,
        RankError as RankError,
    )
    from qsync_fx.explanation import Explanation as Explanation, explain as explain
    from qsync_fx.explanation.applied_plan import Applied as Applied, applied as applied
    from qsync_fx.graph import Operator as Operator, PrecisionGraph as PrecisionGraph
    from qsync_fx.options import Options as Options
    from qsync_fx.passes.base import graph_pass as graph_pass
    from qsync_fx.passes.rewriting.found import Match as Match
    from qsync_fx.passes.rewriting.rewrite_pass import rewrite as rewrite
    from qsync_fx.plan import ClusterPlan as ClusterPlan, Plan as Plan
    from qsync_fx.plan.opid import OpId as OpId
    from qsync_fx.precision import FORMATS as FORMATS, Precision as Precision
    from qsync_fx.predictor.replay.cluster import Cluster as Cluster
    from qsync_fx.predictor.sensitivity.value import Sensitivity as Sensitivity
    from qsync_fx.profiling.measurement import measure as measure
    from qsync_fx.profiling.profile import Profile as Profile
    from qsync_fx.profiling.statistics.measured import sensitivity as sensitivity
    from qsync_fx.rounding.stream import rounding_stream as rounding_stream
    from qsync_fx.switching import switch as switch
    from qsync_fx.timeline.replaying import replay as replay
    from qsync_fx.timeline.timeline import Timeline as Timeline

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(
        (
            "QSyncError",
            "OptionError",
            "PrecisionError",
            "PlanError",
            "PlanWarning",
            "PassError",
            "DeviceError",
            "ProfileError",
            "RankError",
        ),
        "qsync_fx.errors",
    ),
    **dict.fromkeys(("applied", "Applied"), "qsync_fx.explanation.applied_plan"),
    **dict.fromkeys(("explain", "Explanation"), "qsync_fx.explanation"),
    **dict.fromkeys(("PrecisionGraph", "Operator"), "qsync_fx.graph"),
    **dict.fromkeys(("FORMATS", "Precision"), "qsync_fx.precision"),
    "find_plan": "qsync_fx.allocator.finding",
    "Cluster": "qsync_fx.predictor.replay.cluster",
    "Match": "qsync_fx.passes.rewriting.found",
    "OpId": "qsync_fx.plan.opid",
    "Options": "qsync_fx.options",
    **dict.fromkeys(("ClusterPlan", "Plan"), "qsync_fx.plan"),
    "Profile": "qsync_fx.profiling.profile",
    "graph_pass": "qsync_fx.passes.base",
    "measure": "qsync_fx.profiling.measurement",
    "rounding_stream": "qsync_fx.rounding.stream",
    "sensitivity": "qsync_fx.profiling.statistics.measured",
    "Sensitivity": "qsync_fx.predictor.sensitivity.value",
    "replay": "qsync_fx.timeline.replaying",
    "rewrite": "qsync_fx.passes.rewriting.rewrite_pass",
    "switch": "qsync_fx.switching",
    "Timeline": "qsync_fx.timeline.timeline",
}

_MODULES = ("devices", "distributed", "optim")
"""Modules that users name by way of the package: `qsync_fx.devices.get("t4")`."""

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"qsync_fx.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'qsync_fx' has no attribute {name!r}")
    # No submodule may have the name of what it holds: importing it would put the module in place of the thing.
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES) | set(_MODULES))
