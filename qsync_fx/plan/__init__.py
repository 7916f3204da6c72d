"""Precision plans: which operator computes in which precision.

`Plan` maps operators, selected by `OpId` (`operator_id`) or by patterns (`patterns`), to
precisions; `ClusterPlan` has a plan per device class, and the gradient codecs. `plan_loading` reads
files and selects the part of a process, `validation` compares a plan with a model, `plan_file` is
the file format. Start at `plan.py`.
"""

from __future__ import annotations

from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.plan import Choice, Plan

__all__ = ["Choice", "ClusterPlan", "Plan"]
