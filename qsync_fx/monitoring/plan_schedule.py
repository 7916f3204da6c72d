"""Monitor and plan switches of one training, for the callbacks of trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

from qsync_fx.errors import OptionError
from qsync_fx.monitoring.metric_sinks import Destination
from qsync_fx.monitoring.step_monitor import Monitor, monitor
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.cluster_plan import HoldsPlan
from qsync_fx.plan_switching import switch_plan
from qsync_fx.serialization import Path

PlanInput: TypeAlias = Plan | ClusterPlan | HoldsPlan | Path | None
"""Plan argument of `qsync_fx.switch_plan`."""


class PlanSchedule:
    """Monitor with destination `to`, and plans by the number of optimizer steps before them."""

    def __init__(
        self,
        to: Destination | None,
        plans: Mapping[int, PlanInput],
        monitoring: Mapping[str, Any],
    ) -> None:
        for step in plans:
            if not isinstance(step, int) or step < 0:
                raise OptionError(
                    f"{step!r} is not a number of steps",
                    where="plans={step: plan}",
                    do="use integers of 0 or more",
                )
        self._to, self._plans, self._monitoring = to, dict(plans), monitoring
        self._monitor: Monitor | None = None
        self._active: int | None = None

    def begin(self, model: nn.Module, step: int) -> None:
        """Start the monitor of a training that continues after `step` steps."""
        self.end()
        self._active = None
        self.before_step(model, step)
        if self._to is not None:
            settings = {"first_step": step, **self._monitoring}
            self._monitor = monitor(model, self._to, **settings).__enter__()

    def before_step(self, model: nn.Module, step: int) -> None:
        """Activate the latest plan for `step` or before, if another one is active."""
        latest = max((start for start in self._plans if start <= step), default=None)
        if latest is not None and latest != self._active:
            switch_plan(model, self._plans[latest])
            self._active = latest

    def end(self) -> None:
        """Close the monitor."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
