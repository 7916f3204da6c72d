"""Callback of the Trainer of transformers: metrics, and plans by step."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from qsync_fx.monitoring.plan_schedule import PlanSchedule


class TrainerMonitor(PlanSchedule, TrainerCallback):  # type: ignore[misc]
    """Monitor and plan switches of a transformers.Trainer."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any
    ) -> None:
        self._begin(model, state.global_step)

    def on_step_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any
    ) -> None:
        self._before_step(model, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end()
