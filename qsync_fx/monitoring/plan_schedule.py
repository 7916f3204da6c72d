"""Base of the callbacks of trainers: monitor and plan switches of one training."""

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
    """Monitor and plan switches of a training."""

    def __init__(
        self,
        to: Destination | None = None,
        *,
        plans: Mapping[int, PlanInput] | None = None,
        **monitoring: Any,
    ) -> None:
        """Create a callback.

        Args:
            to: as of `qsync_fx.monitor`; None for no metrics.
            plans: plan that becomes active before a step, by the number of steps before it.
            monitoring: keyword arguments of `qsync_fx.monitor`.
        """
        for step in plans or ():
            if not isinstance(step, int) or step < 0:
                raise OptionError(
                    f"{step!r} is not a number of steps",
                    where="plans={step: plan}",
                    do="use integers of 0 or more",
                )
        self._to, self._plans, self._monitoring = to, dict(plans or {}), monitoring
        self._monitor: Monitor | None = None
        self._active: int | None = None

    def _begin(self, model: nn.Module, step: int) -> None:
        """Start the monitor of a training that continues after `step` steps."""
        self._end()
        self._active = None
        self._before_step(model, step)
        if self._to is not None:
            settings = {"first_step": step, **self._monitoring}
            self._monitor = monitor(model, self._to, **settings).__enter__()

    def _before_step(self, model: nn.Module, step: int) -> None:
        """Activate the latest plan for `step` or before, if another one is active."""
        latest = max((start for start in self._plans if start <= step), default=None)
        if latest is not None and latest != self._active:
            switch_plan(model, self._plans[latest])
            self._active = latest

    def _end(self) -> None:
        """Close the monitor."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
