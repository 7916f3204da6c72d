"""Precision plans: which operator computes in which precision.

`Plan` (plan.py) maps operators, selected by `OpId` or by patterns (operator_id.py), to precisions;
`ClusterPlan` (cluster_plan.py) has a plan per device class, and the gradient codecs.
"""

from __future__ import annotations

from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.plan import Choice, Plan

__all__ = ["Choice", "ClusterPlan", "Plan"]
