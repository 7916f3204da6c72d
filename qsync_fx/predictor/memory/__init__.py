"""The memory of a training step under a plan, reckoned from a `ModelGraph`."""

from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.memory.liveness import Keeper, KeptTerm, LiveBuffers, kept_terms, live_buffers
from qsync_fx.predictor.memory.outside_passes import (
    ADAM,
    FUSED_ADAM,
    MOMENTUM,
    SGD,
    LossMemory,
    OptimizerMemory,
    Training,
)
from qsync_fx.predictor.memory.peak_memory import (
    Anchor,
    Memory,
    Moment,
    Orders,
    anchored_bytes,
    most_bytes,
    peak_bytes,
    step_memory,
)

__all__ = [
    "ADAM",
    "FUSED_ADAM",
    "MOMENTUM",
    "SGD",
    "Anchor",
    "Category",
    "Keeper",
    "KeptTerm",
    "LiveBuffers",
    "LossMemory",
    "Memory",
    "Moment",
    "OptimizerMemory",
    "Orders",
    "Training",
    "anchored_bytes",
    "kept_terms",
    "live_buffers",
    "most_bytes",
    "peak_bytes",
    "step_memory",
]
