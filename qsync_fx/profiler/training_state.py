"""Context managers that restore the training state of a model, and rerun passes reproducibly.

`undisturbed` restores parameters, gradients, buffers, training modes, torch's random number
generators and the rounding stream. `untouched` also restores the optimizer and the generators of
NumPy and Python. All objects stay the same objects. Within `repeatable`, passes start from the same
buffers and random numbers, so two passes differ only by their inputs.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.diagnostics.explain_model import unchanged
from qsync_fx.rounding import rounding_stream

Again = Callable[[int], None]
"""Restores buffers and seeds the generators; the sample number selects the rounding draws."""


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore on exit everything that running and differentiating a model changes."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    place = rounding_stream.state_dict()
    try:
        with unchanged(tensors, tensors), torch.enable_grad():
            yield
    finally:
        rounding_stream.load_state_dict(place)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def repeatable(model: nn.Module, seed: int) -> Iterator[Again]:
    """Yield a function that resets buffers and random numbers before a pass."""
    buffers = list(model.buffers())
    saved = [buffer.detach().clone() for buffer in buffers]

    def again(sample: int) -> None:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)
        torch.manual_seed(seed)
        rounding_stream.load_state_dict({"seed": seed, "draws": sample << 20})

    yield again


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that require gradients, without duplicates."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextlib.contextmanager
def untouched(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Restore the model, optimizer and generators on exit.

    Within the context the learning rates are zero, so that optimizer steps leave parameters
    unchanged.
    """
    with undisturbed(model), _generators(), _optimizer(optimizer):
        for parameter in model.parameters():
            parameter.grad = None
        yield


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    saved = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(saved)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def _optimizer(optimizer: Optimizer | None) -> Iterator[None]:
    if optimizer is None:
        yield
        return
    groups = [dict(group) for group in optimizer.param_groups]
    states = {parameter: (state, dict(state)) for parameter, state in optimizer.state.items()}
    values = {
        t: t.detach().clone()
        for _, state in states.values()
        for t in state.values()
        if isinstance(t, Tensor)
    }
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = group["lr"] * 0
    try:
        yield
    finally:
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(saved)
        optimizer.state.clear()
        with torch.no_grad():
            for tensor, value in values.items():
                tensor.copy_(value)
        for parameter, (state, entries) in states.items():
            state.clear()
            state.update(entries)
            optimizer.state[parameter] = state
