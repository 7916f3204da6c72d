"""Callback of the Trainer of transformers: metrics, and plans by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from qsync_fx.monitoring.plan_schedule import PlanInput, PlanSchedule


class TrainerMonitor(TrainerCallback):  # type: ignore[misc]
    """Monitor and plan switches of a transformers.Trainer.

    Args:
        to: as of `qsync_fx.monitor`; None for no metrics.
        plans: plan that becomes active before a step, by the number of steps before it.
        monitoring: keyword arguments of `qsync_fx.monitor`.
    """

    def __init__(
        self, to: Any = None, *, plans: Mapping[int, PlanInput] | None = None, **monitoring: Any
    ) -> None:
        self._schedule = PlanSchedule(to, plans or {}, monitoring)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any
    ) -> None:
        self._schedule.begin(model, state.global_step)

    def on_step_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any
    ) -> None:
        self._schedule.before_step(model, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._schedule.end()
