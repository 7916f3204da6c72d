"""How long a model's operators take on a device of the catalog: reckoned from their costs, and not measured."""

from qsync_fx.predictor.reckoned.times import DeviceTimes

__all__ = ["DeviceTimes"]
