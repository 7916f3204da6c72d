"""Allocators: choose a compute format for each adjustable operator on each device class.

A `Problem` states the choices and limits, `PlanEvaluator` computes the cost of a plan, and an
`Allocator` returns a `PlanResult`. The entry point is `api.find_plan`; `recovery` is the allocator
of QSync, `milp` the exact allocator, `baselines` the comparison. Start reading at `problem`.

Invariant: the metrics of a `PlanResult` come from `PlanEvaluator` (cost mapper, memory model,
replayer), never from the cost model inside an allocator.
"""

from qsync_fx.allocator.evaluator import Evaluation, PlanEvaluator, evaluate_plan
from qsync_fx.allocator.plan_result import (
    Allocator,
    PlanNote,
    PlanNoteKind,
    PlanResult,
    SolverIteration,
)
from qsync_fx.allocator.problem import DeviceClass, Problem

__all__ = [
    "Allocator",
    "DeviceClass",
    "Evaluation",
    "PlanEvaluator",
    "PlanNote",
    "PlanNoteKind",
    "PlanResult",
    "Problem",
    "SolverIteration",
    "evaluate_plan",
]
