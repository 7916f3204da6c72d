"""Peak memory of a training step under a plan, computed from a `ModelGraph`.

`forward` and `backward` express the passes as tasks and buffers (`buffers`), `kernel_order` orders
the tasks as Inductor does, and `peak_memory` computes the live bytes over time. `liveness` returns
live buffers and bounds for the allocator. Start with `peak_memory.step_memory`.
"""

from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.memory.liveness import (
    LiveBuffers,
    SavedTerm,
    SavingOperator,
    live_buffers,
    saved_terms,
)
from qsync_fx.predictor.memory.outside_passes import (
    ADAM,
    FUSED_ADAM,
    MOMENTUM,
    SGD,
    LossMemory,
    OptimizerMemory,
    TrainingMemory,
)
from qsync_fx.predictor.memory.peak_memory import (
    Anchor,
    Moment,
    Orders,
    StepMemory,
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
    "LiveBuffers",
    "LossMemory",
    "Moment",
    "OptimizerMemory",
    "Orders",
    "SavedTerm",
    "SavingOperator",
    "StepMemory",
    "TrainingMemory",
    "anchored_bytes",
    "live_buffers",
    "most_bytes",
    "peak_bytes",
    "saved_terms",
    "step_memory",
]
