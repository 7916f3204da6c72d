"""Training that leaves no trace: all that a step changes is put back.

Invariant: after `untouched` parameters, buffers, gradients, training modes, the optimizer's state and settings, and the random number
generators of torch, numpy and Python are what they were before, in the same objects.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.profiling.statistics.tensors.undisturbed import undisturbed


@contextlib.contextmanager
def untouched(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Lets a model be trained for a while; while that lasts, the optimizer's learning rates are zero, so that values stay what they are."""
    with undisturbed(model), _generators(), _optimizer(optimizer):
        for parameter in model.parameters():
            parameter.grad = None
        yield


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    kept = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(kept)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def _optimizer(optimizer: Optimizer | None) -> Iterator[None]:
    if optimizer is None:
        yield
        return
    groups = [dict(group) for group in optimizer.param_groups]
    states = {parameter: (state, dict(state)) for parameter, state in optimizer.state.items()}
    values = {t: t.detach().clone() for _, state in states.values() for t in state.values() if isinstance(t, Tensor)}
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0
    try:
        yield
    finally:
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(kept)
        optimizer.state.clear()
        with torch.no_grad():
            for tensor, value in values.items():
                tensor.copy_(value)
        for parameter, (state, entries) in states.items():
            state.clear()
            state.update(entries)
            optimizer.state[parameter] = state
