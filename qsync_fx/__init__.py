"""Data-parallel training over unequal GPUs, with the fewest operators in low precision.

`torch.compile(model, backend="qsync")` compiles a model, `explain` shows the decisions for each
operator, `plan_coverage` shows which parts of a plan run, and `graph_pass` adds a custom pass.
`measure` and `find_plan` profile a model and choose the format of each operator.

Invariant: importing this package imports only torch; each name is imported on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qsync_fx import html_view

if TYPE_CHECKING:
    from qsync_fx import (
        devices as devices,
        distributed as distributed,
        monitoring as monitoring,
        optim as optim,
    )
    from qsync_fx.allocator.api import cache_plan as cache_plan, find_plan as find_plan
    from qsync_fx.diagnostics import Explanation as Explanation, explain as explain
    from qsync_fx.diagnostics.coverage_report import (
        PlanCoverage as PlanCoverage,
        plan_coverage as plan_coverage,
    )
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
    from qsync_fx.formats import FORMATS as FORMATS, Precision as Precision
    from qsync_fx.graph import Operator as Operator, PrecisionGraph as PrecisionGraph
    from qsync_fx.monitoring import monitor as monitor
    from qsync_fx.options import Options as Options
    from qsync_fx.passes.pass_base import graph_pass as graph_pass
    from qsync_fx.passes.rewrite_pass import rewrite as rewrite
    from qsync_fx.passes.rewrite_pattern import Match as Match
    from qsync_fx.plan import ClusterPlan as ClusterPlan, Plan as Plan
    from qsync_fx.plan.operator_id import OpId as OpId
    from qsync_fx.plan_switching import switch_plan as switch_plan
    from qsync_fx.predictor.indicator.sensitivity_map import Sensitivity as Sensitivity
    from qsync_fx.predictor.replayer.cluster import Cluster as Cluster
    from qsync_fx.profiler.analytic_profile import catalog_profile as catalog_profile
    from qsync_fx.profiler.measurement import measure as measure
    from qsync_fx.profiler.profile import Profile as Profile
    from qsync_fx.profiler.sensitivity.estimate import sensitivity as sensitivity
    from qsync_fx.report.document import Report as Report, save_report as save_report
    from qsync_fx.rounding import rounding_stream as rounding_stream
    from qsync_fx.timeline.replay_plans import replay as replay
    from qsync_fx.timeline.timeline import Timeline as Timeline

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(
        (
            "QSyncError OptionError PrecisionError PlanError PlanWarning PassError DeviceError "
            "ProfileError RankError"
        ).split(),
        "qsync_fx.errors",
    ),
    **dict.fromkeys(("plan_coverage", "PlanCoverage"), "qsync_fx.diagnostics.coverage_report"),
    **dict.fromkeys(("explain", "Explanation"), "qsync_fx.diagnostics"),
    **dict.fromkeys(("PrecisionGraph", "Operator"), "qsync_fx.graph"),
    **dict.fromkeys(("FORMATS", "Precision"), "qsync_fx.formats"),
    "find_plan": "qsync_fx.allocator.api",
    "Cluster": "qsync_fx.predictor.replayer.cluster",
    "Match": "qsync_fx.passes.rewrite_pattern",
    "OpId": "qsync_fx.plan.operator_id",
    "Options": "qsync_fx.options",
    **dict.fromkeys(("ClusterPlan", "Plan"), "qsync_fx.plan"),
    "Profile": "qsync_fx.profiler.profile",
    "graph_pass": "qsync_fx.passes.pass_base",
    "cache_plan": "qsync_fx.allocator.api",
    "catalog_profile": "qsync_fx.profiler.analytic_profile",
    "measure": "qsync_fx.profiler.measurement",
    **dict.fromkeys(("Report", "save_report"), "qsync_fx.report.document"),
    "monitor": "qsync_fx.monitoring",
    "rounding_stream": "qsync_fx.rounding",
    "sensitivity": "qsync_fx.profiler.sensitivity.estimate",
    "Sensitivity": "qsync_fx.predictor.indicator.sensitivity_map",
    "replay": "qsync_fx.timeline.replay_plans",
    "rewrite": "qsync_fx.passes.rewrite_pass",
    "switch_plan": "qsync_fx.plan_switching",
    "Timeline": "qsync_fx.timeline.timeline",
}

_MODULES = ("devices", "distributed", "monitoring", "optim")
"""Submodules that users access as attributes: `qsync_fx.devices.get("t4")`."""

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"qsync_fx.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'qsync_fx' has no attribute {name!r}")
    # No submodule may have the name of an object in it: its import would replace the object.
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def _report(value: object) -> html_view.Page:
    page: html_view.Page = __getattr__("Report")(value)
    return page


html_view.register(_report)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES) | set(_MODULES))
