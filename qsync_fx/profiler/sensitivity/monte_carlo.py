"""Method "monte_carlo", the reference for the other indicators.

Each operator in turn runs in each precision, in the backend's graph under the plan that names only
this operator. The gradients are compared with FP32's for the same weights, batch and dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from qsync_fx.diagnostics.explanation import Explained, ReplayedPlan
from qsync_fx.plan import Plan
from qsync_fx.profiler.sensitivity.gradient_step import GradientStep, Key, MethodSpec
from qsync_fx.profiler.tensor_capture.graph_capture import Run


@dataclass(frozen=True)
class MonteCarlo:
    """Method "monte_carlo"; one draw if rounding is deterministic."""

    draws: int = 4
    _lowered: dict[Key, Run] = field(default_factory=dict)

    def look(self, step: GradientStep) -> dict[Key, float]:
        exact = step.gradients()
        result: dict[Key, float] = {}
        for name, precision in step.keys:
            plan = Plan("fp32", operators={name: precision})
            run = self._lowered.setdefault((name, precision), lowered(plan))
            draws = step.changes[name][precision].draws(self.draws)
            result[name, precision] = step.square_error(run, exact, draws)
        return result


def lowered(plan: Plan) -> Run:
    """Return a runner of graphs as the backend lowers them under `plan`."""
    modules: dict[int, Any] = {}

    def run(part: Explained, inputs: Sequence[Any]) -> Any:
        if id(part) not in modules:
            with part.context.on_target():
                modules[id(part)] = ReplayedPlan(part.snapshots, part.costing, plan).graph.module
        return modules[id(part)](*inputs)

    return run


METHODS: Final = (
    MethodSpec("monte_carlo", MonteCarlo, lambda ops, formats: 1 + 4 * ops * formats),
)
