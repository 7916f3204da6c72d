"""Predictor: sensitivity, step time and peak memory of a plan, without running the model (QSync).

Start with `model.ModelGraph`, the model, `times.Times`, the source of operator times, and
`cost_mapper.CostMapper`, which maps a plan to a schedule that `replayer` simulates. `indicator` and
`memory` predict variance and peak memory. `qsync_fx.profiler` has the measurements.
"""

from qsync_fx.predictor.replayer.collectives import ddp_buckets

__all__ = ["ddp_buckets"]
