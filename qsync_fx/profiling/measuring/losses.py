"""What a loss keeps and takes that stands behind the compiled model, asked of the loss itself: it is computed and differentiated, and its
allocations are counted.

Invariant: the results count for as long as the loss needs them; of what is given nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from torch import Tensor, autograd, nn
from torch.utils import _pytree as pytree

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

    def once() -> tuple[Tensor, Sequence[Tensor | None]]:
        # Copies are its own, so that they go as soon as the loss lets go of them, as what a model returns does.
        number = loss(*(leaf.clone() for leaf in leaves))
        return number, autograd.grad(number, leaves, allow_unused=True)

    once()
    recording = Recording()
    try:
        recording.second()
        _kept, gradients = once()
        del gradients
    finally:
        _, events = recording.stop()
    return LossMemory(max(0, sum(events)), max(accumulate(events), default=0))


def loss_in_step(
    step: Callable[[Any, Any], Tensor], module: nn.Module, batch: object, returned: object
) -> LossMemory | None:
    """Returns what the loss of a user's step takes: all that the step computes from what the model returns.

    Args:
        step: takes the model and a batch, returns the loss. It runs twice, with a model that returns at once.
        returned: what the model returned for the batch.

    Returns:
        None where that cannot be found out: results have no gradients, are not tensors of the CPU in containers that torch knows, or the
        step needs more of a model than these.
    """
    leaves, spec = pytree.tree_flatten(returned)
    differentiated = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
    if not differentiated or any(leaf.device.type != "cpu" for leaf in differentiated.values()):
        return None

    def loss(*results: Tensor) -> Tensor:
        given = dict(zip(differentiated, results, strict=True))
        now = pytree.tree_unflatten([given.get(id(leaf), leaf) for leaf in leaves], spec)
        with _returning(module, now):
            return step(module, batch)

    try:
        return loss_memory(loss, *differentiated.values())
    except Exception:  # noqa: BLE001 - a step that runs with a model need not run without one, and raises what it likes
        return None


@contextmanager
def _returning(module: nn.Module, result: object) -> Iterator[None]:
    """Has a module return this whatever it is called with, and compute nothing."""
    held = vars(module)
    before = {name: held[name] for name in ("forward",) if name in held}
    held["forward"] = lambda *_, **__: result
    try:
        yield
    finally:
        del held["forward"]
        held.update(before)
