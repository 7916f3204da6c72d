"""Which operator of a model computes in which format on which device: what chooses a plan.

`problem` says what is to be decided and within which limits, judging/ what a plan costs, `answer` what an allocator found.

Invariant: an answer says of a plan what the judge says of it: the cost mapper, the memory model and the replayer. What an allocator reckons
with meanwhile is its own.
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
