"""Callback of the Trainer of Lightning: metrics, and plans by step."""

from __future__ import annotations

from typing import Any

import lightning

from qsync_fx.monitoring.plan_schedule import PlanSchedule


class LightningMonitor(PlanSchedule, lightning.Callback):
    """Monitor and plan switches of a lightning.Trainer."""

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._begin(pl_module, trainer.global_step)

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._before_step(pl_module, trainer.global_step)

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        self._end()

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        self._end()
