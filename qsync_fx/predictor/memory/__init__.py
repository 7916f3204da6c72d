"""The memory of a training step under a plan, reckoned from a `ModelGraph`."""

from qsync_fx.predictor.memory.anchors import Anchor, anchored_bytes
from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.memory.live import Keeper, KeptTerm, LiveBuffers, kept_terms, live_buffers
from qsync_fx.predictor.memory.step import Memory, Moment, Orders, most_bytes, peak_bytes, step_memory
from qsync_fx.predictor.memory.training import ADAM, FUSED_ADAM, MOMENTUM, SGD, LossMemory, OptimizerMemory, Training

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
