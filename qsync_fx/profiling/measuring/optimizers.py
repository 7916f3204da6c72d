"""What an optimizer keeps and takes, asked of the optimizer itself: one like it steps on small parameters, and its allocations are counted.

Invariant: the optimizer that is asked, its parameters and its state stay as they are.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

from qsync_fx.errors import ProfileError
from qsync_fx.predictor.memory.training import OptimizerMemory
from qsync_fx.profiling.measuring.peak import measured_peak

_ELEMENTS = 16384


def optimizer_memory(optimizer: Optimizer) -> OptimizerMemory:
    """Returns what an optimizer takes, in FP32 values an element of a parameter.

    Raises:
        ProfileError: one like it cannot be made from its class and defaults, or does not step on parameters alone.
    """
    one, two, three = (_peak(optimizer, count) for count in (1, 2, 3))
    together = three[1] - two[1]
    return OptimizerMemory(
        state=one[0], temporary=one[1] - together, before=two[1] - one[1] - together, together=together
    )


def known_memory(optimizer: Optimizer | None) -> OptimizerMemory | None:
    """Returns what an optimizer takes, nothing for none; None where that cannot be found out."""
    try:
        return OptimizerMemory() if optimizer is None else optimizer_memory(optimizer)
    except ProfileError:
        return None


def _peak(optimizer: Optimizer, count: int) -> tuple[float, float]:
    parameters = [torch.nn.Parameter(torch.zeros(_ELEMENTS)) for _ in range(count)]
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    try:
        like = type(optimizer)(parameters, **settings)
        for parameter in parameters:
            parameter.grad = torch.ones(_ELEMENTS)
        like.step()
        taken = measured_peak(like.step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ProfileError(
            f"what a step of {type(optimizer).__name__} takes cannot be found out: {error}",
            do="give it: predictor.memory.OptimizerMemory",
        ) from error
    held = [value for state in like.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    state = sum(tensor.nbytes for tensor in held if tensor.numel() == _ELEMENTS) / count
    return state / _ELEMENTS / 4, round(taken / _ELEMENTS / 4, 2)
