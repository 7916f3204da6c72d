"""What a loss keeps and takes that stands behind the compiled model, asked of the loss itself: it is computed and differentiated, and its
allocations are counted.

Invariant: the results count for as long as the loss needs them; of what is given nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch import Tensor, autograd

from qsync_fx.predictor.memory.training import LossMemory
from qsync_fx.profiling.measuring.peak import Recording


def loss_memory(loss: Callable[..., Tensor], *results: Tensor) -> LossMemory:
    """Returns what a loss takes in bytes, on the CPU, where torch's allocator tells of each.

    Args:
        loss: computes it, a number, from results of the model.
        results: as large, and in the format, as the model returns them for the batches that it is trained with; what is in them does not
            matter.
    """
    leaves = [result.detach().clone().requires_grad_() for result in results]

    def once() -> tuple[Tensor, tuple[Tensor, ...]]:
        # Copies are its own, so that they go as soon as the loss lets go of them, as what a model returns does.
        number = loss(*(leaf.clone() for leaf in leaves))
        return number, autograd.grad(number, leaves)

    once()
    recording = Recording()
    try:
        recording.second()
        kept = once()
    finally:
        _, events = recording.stop()
    gradients = sum(gradient.nbytes for gradient in kept[1])
    return LossMemory(sum(events) - gradients, max(accumulate(events)))
