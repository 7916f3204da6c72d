"""Metrics of a training run: `monitor`, and callbacks of trainers. Start with step_monitor.py.

Invariant: a monitor changes no tensor, gradient, random state or compiled code. The callbacks are
imported on first use, because their trainers are optional.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qsync_fx.monitoring.metric_sinks import MetricSink
from qsync_fx.monitoring.step_monitor import Monitor, monitor

if TYPE_CHECKING:
    from qsync_fx.monitoring.lightning_callback import LightningMonitor as LightningMonitor
    from qsync_fx.monitoring.trainer_callback import TrainerMonitor as TrainerMonitor

_CALLBACKS = {
    "LightningMonitor": "qsync_fx.monitoring.lightning_callback",
    "TrainerMonitor": "qsync_fx.monitoring.trainer_callback",
}

__all__ = ["LightningMonitor", "MetricSink", "Monitor", "TrainerMonitor", "monitor"]


def __getattr__(name: str) -> Any:
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CALLBACKS[name]), name)
