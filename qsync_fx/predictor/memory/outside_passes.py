"""What a step holds beside the two passes: the optimizer's state and temporaries, what the loss takes, and the buckets of gradients.

Invariant: bytes here follow from numbers of elements. Nothing depends on a plan: parameters, their gradients and states keep their format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FP32 = 4


@dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer takes, in FP32 values an element of a parameter.

    `qsync_fx.profiler.timing.measured_memory.optimizer_memory` asks an optimizer for it. The values below are those of torch's on the CPU.

    Attributes:
        state: what it keeps from step to step.
        temporary: what it takes while it updates a parameter.
        before: what is still there then of the parameter before.
        together: what it takes for all parameters at once, where it updates them together.
    """

    state: float = 0.0
    temporary: float = 0.0
    before: float = 0.0
    together: float = 0.0

    def state_bytes(self, numels: Sequence[int]) -> int:
        return round(self.state * sum(numels)) * _FP32

    def step_bytes(self, numels: Sequence[int]) -> int:
        """Returns the most that a step takes beyond state and gradients."""
        pairs = zip(numels, [0, *numels], strict=False)
        alone = max(
            (self.temporary * owned + self.before * before for owned, before in pairs), default=0.0
        )
        return round(alone + self.together * sum(numels)) * _FP32


SGD = OptimizerMemory()
MOMENTUM = OptimizerMemory(state=1)
ADAM = OptimizerMemory(state=2, temporary=2, before=1)
FUSED_ADAM = OptimizerMemory(state=2)


@dataclass(frozen=True)
class LossMemory:
    """What a loss takes that stands behind the compiled model, in bytes, with the results of one batch.

    `qsync_fx.profiler.timing.measured_memory.loss_memory` asks a loss for it.

    Attributes:
        held: what is there throughout the model's backward pass, beside the gradients that this begins with. Of torch's losses on the CPU
            mse_loss and smooth_l1_loss keep the storage of all differences behind the number that they give.
        most: the most from the results, these included, to their gradients.
    """

    held: int = 0
    most: int = 0


@dataclass(frozen=True)
class TrainingMemory:
    """
    Attributes:
        optimizer: what it takes.
        buckets: whether gradients are copied into buckets to be sent (DistributedDataParallel without gradient_as_bucket_view).
        loss: what it takes, where it is no part of the model; None where that is not known, and the gradients that the backward pass begins
            with are taken to be held throughout, which stands for as much.
    """

    optimizer: OptimizerMemory = SGD
    buckets: bool = False
    loss: LossMemory | None = None
