"""Plans: which operator computes in which precision.

`opid` says who an operator is and `patterns` selects several; `plan_file` is what stands in a plan's file, `plan_check` holds a plan
against a model. `cluster_plan` has a plan for each class of devices, and `gradient_codecs` what it says of gradients.
"""

from __future__ import annotations

from qsync_fx.plan.cluster_plan import ClusterPlan
from qsync_fx.plan.plan import Choice, Plan

__all__ = ["Choice", "ClusterPlan", "Plan"]
