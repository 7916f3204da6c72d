"""Memory of a training step outside of the two passes: optimizer, loss and gradient buckets.

It depends on element counts, not on the plan: parameters, their gradients and optimizer states have
fixed formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FP32 = 4


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of an optimizer, in FP32 values per parameter element.

    `qsync_fx.profiler.timing.measured_memory.optimizer_memory` measures it. The constants below are
    for torch's CPU optimizers.

    Attributes:
        state: persistent state.
        temporary: temporaries during the update of a parameter.
        before: temporaries of the previous parameter that are still live then.
        together: temporaries for all parameters at once, in an optimizer with a joint update.
    """

    state: float = 0.0
    temporary: float = 0.0
    before: float = 0.0
    together: float = 0.0

    def state_bytes(self, numels: Sequence[int]) -> int:
        return round(self.state * sum(numels)) * _FP32

    def step_bytes(self, numels: Sequence[int]) -> int:
        """Return the peak of an optimizer step beyond state and gradients, in bytes."""
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
    """Memory of a loss outside of the compiled model, for the results of one batch, in bytes.

    `qsync_fx.profiler.timing.measured_memory.loss_memory` measures it.

    Attributes:
        held: live throughout the model's backward pass, beyond the incoming gradients. On a CPU,
            torch's mse_loss and smooth_l1_loss retain the storage of all differences.
        most: peak between the model's results and their gradients, both included.
    """

    held: int = 0
    most: int = 0


@dataclass(frozen=True)
class TrainingMemory:
    """Memory settings of a training.

    Attributes:
        optimizer: memory of the optimizer.
        buckets: whether gradients are copied into communication buckets, as in
            DistributedDataParallel without gradient_as_bucket_view.
        loss: memory of a loss outside of the model. None if unknown: incoming gradients of the
            backward pass then count as live throughout it, as an estimate.
    """

    optimizer: OptimizerMemory = SGD
    buckets: bool = False
    loss: LossMemory | None = None
