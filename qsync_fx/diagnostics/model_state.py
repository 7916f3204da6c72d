"""Restoration of the state that running and training a model changes.

All tensors, modules and optimizer states stay the same objects; only their values are restored.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.rounding import rounding_stream

SavedValues = Sequence[tuple[Tensor, Tensor]]
"""Tensors with copies of their values."""


def copies(tensors: Iterable[Tensor]) -> SavedValues:
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def copy_back(saved: SavedValues) -> None:
    with torch.no_grad():
        for tensor, value in saved:
            tensor.copy_(value)


@contextmanager
def restored(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Restore a model, its optimizer and all random number generators on exit.

    This covers parameters, gradients, buffers, training modes, the state and settings of the
    optimizer, the generators of torch, NumPy and Python, and the rounding stream.
    """
    saved = copies(model.parameters())
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        with forward_restored(model), _optimizer_restored(optimizer):
            yield
    finally:
        copy_back(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


@contextmanager
def forward_restored(model: nn.Module) -> Iterator[None]:
    """Restore what a forward pass changes on exit: buffers and random number generators."""
    saved = copies(model.buffers())
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
    rounding, of_python = rounding_stream.state_dict(), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        copy_back(saved)
        rounding_stream.load_state_dict(rounding)
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextmanager
def _optimizer_restored(optimizer: Optimizer | None) -> Iterator[None]:
    if optimizer is None:
        yield
        return
    groups = [dict(group) for group in optimizer.param_groups]
    states = {parameter: (state, dict(state)) for parameter, state in optimizer.state.items()}
    entries = [value for _, state in states.values() for value in state.values()]
    saved = copies(value for value in entries if isinstance(value, Tensor))
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(settings)
        copy_back(saved)
        optimizer.state.clear()
        for parameter, (state, before) in states.items():
            state.clear()
            state.update(before)
            optimizer.state[parameter] = state


@contextmanager
def without_training(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Run training steps that do not train: `restored`, without gradients at the start.

    Learning rates are zero, so that steps of the optimizer leave the parameters unchanged.
    """
    with restored(model, optimizer), torch.enable_grad():
        for parameter in model.parameters():
            parameter.grad = None
        for group in optimizer.param_groups if optimizer is not None else ():
            if "lr" in group:
                group["lr"] = group["lr"] * 0
        yield
