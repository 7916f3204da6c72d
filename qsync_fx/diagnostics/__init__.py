"""Diagnostics: the backend's decisions for a model, and their reasons.

`explain` runs the passes on a model and returns an `Explanation`, which also evaluates other plans.
`coverage_report.plan_coverage` reports which parts of a plan run in a training model. `dot` draws a
graph. Start with `explain_model.explain`.
"""

from __future__ import annotations

from qsync_fx.diagnostics.explain_model import explain
from qsync_fx.diagnostics.explanation import Explanation

__all__ = ["Explanation", "explain"]
