"""Peak memory of a training step under a plan, computed from a `ModelGraph`.

`forward` and `backward` express the passes as tasks and buffers (`buffers`), `kernel_order` orders
the tasks as Inductor does, and `peak_memory` computes the live bytes over time. Start with
`peak_memory.step_memory`; `buffers.lives` is the only implementation of liveness.
"""

from qsync_fx.predictor.memory.buffers import Category as Category
from qsync_fx.predictor.memory.peak_memory import (
    ADAM as ADAM,
    MOMENTUM as MOMENTUM,
    SGD as SGD,
    Anchor as Anchor,
    LossMemory as LossMemory,
    Moment as Moment,
    OptimizerMemory as OptimizerMemory,
    Orders as Orders,
    StepMemory as StepMemory,
    TrainingMemory as TrainingMemory,
    anchored_bytes as anchored_bytes,
    peak_bytes as peak_bytes,
    step_memory as step_memory,
)
