"""Peak memory of a training step under a plan, computed from a `ModelGraph`.

`forward` and `backward` express the passes as tasks and buffers (`buffers`), `kernel_order` orders
the tasks as Inductor does, and `peak_memory` computes the live bytes over time. Start with
`peak_memory.step_memory`; `buffers.lives` is the only implementation of liveness.
"""

from qsync_fx.predictor.memory.buffers import Category
from qsync_fx.predictor.memory.peak_memory import (
    ADAM,
    FUSED_ADAM,
    MOMENTUM,
    SGD,
    Anchor,
    LossMemory,
    Moment,
    OptimizerMemory,
    Orders,
    StepMemory,
    TrainingMemory,
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
    "LossMemory",
    "Moment",
    "OptimizerMemory",
    "Orders",
    "StepMemory",
    "TrainingMemory",
    "anchored_bytes",
    "most_bytes",
    "peak_bytes",
    "step_memory",
]
