"""Predictor: sensitivity, step time and peak memory of a plan, without running the model.

The package comprises QSync's indicator, cost mapper and replayer, and a model of peak memory.
Start with `model.ModelGraph`, the model as they read it, `times.Times`, the source of operator
times, and `cost_mapper.CostMapper`, which maps a plan to a schedule that `replayer` simulates.
Invariant: only pure functions of profiles, device catalogs and model graphs. The measurements
are in `qsync_fx.profiler`.
"""

from qsync_fx.predictor.replayer.collectives import ddp_buckets

__all__ = ["ddp_buckets"]
