"""Names of the package, which __init__.py imports on first use."""

from qsync_fx.monitoring.lightning_callback import LightningMonitor as LightningMonitor
from qsync_fx.monitoring.metric_sinks import MetricSink as MetricSink
from qsync_fx.monitoring.step_monitor import Monitor as Monitor, monitor as monitor
from qsync_fx.monitoring.trainer_callback import TrainerMonitor as TrainerMonitor
