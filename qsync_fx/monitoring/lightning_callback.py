"""Callback of the Trainer of Lightning: metrics, and plans by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning

from qsync_fx.monitoring.plan_schedule import PlanInput, PlanSchedule


class LightningMonitor(lightning.Callback):
    """Monitor and plan switches of a lightning.Trainer.

    Args:
        to: as of `qsync_fx.monitor`; None for no metrics.
        plans: plan that becomes active before a step, by the number of steps before it.
        monitoring: keyword arguments of `qsync_fx.monitor`.
    """

    def __init__(
        self, to: Any = None, *, plans: Mapping[int, PlanInput] | None = None, **monitoring: Any
    ) -> None:
        self._schedule = PlanSchedule(to, plans or {}, monitoring)

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._schedule.begin(pl_module, trainer.global_step)

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._schedule.before_step(pl_module, trainer.global_step)

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._schedule.end()

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        self._schedule.end()
