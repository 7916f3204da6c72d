"""Runs that leave a model as it was, and repeat themselves.

Invariant: after `undisturbed` parameters, gradients, buffers, training mode, torch's random generators and the rounding stream are what
they were. Each `again` within it starts from the same buffers and random numbers, so that two passes differ by what is put into them alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from qsync_fx.explanation.unchanged import unchanged
from qsync_fx.rounding.stream import rounding_stream

Again = Callable[[int], None]
"""Puts buffers and random numbers back; its number tells apart what is rounded."""


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts back, at the end, all that running and differentiating a model changes."""
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
    """Yields what starts a pass again."""
    buffers = list(model.buffers())
    kept = [buffer.detach().clone() for buffer in buffers]

    def again(sample: int) -> None:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
        torch.manual_seed(seed)
        rounding_stream.load_state_dict({"seed": seed, "draws": sample << 20})

    yield again


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that get gradients, each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
