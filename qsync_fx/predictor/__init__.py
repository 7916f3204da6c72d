"""What a plan will cost before it runs: sensitivity, time and memory, of devices at hand and devices that are not.

Invariant: pure functions of profiles, catalogs and DAGs. Nothing here runs a model; what runs it stands in qsync_fx.profiler.
"""

from qsync_fx.predictor.replayer.ddp_buckets import ddp_buckets

__all__ = ["ddp_buckets"]
