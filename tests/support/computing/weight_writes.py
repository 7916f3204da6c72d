"""Writes to the weight of a layer.

Each negates the weight: the scale of its INT8 copy stays valid and the output changes its sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import nn

import qsync_fx

Write = Callable[[nn.Linear], object]


def stepped(layer: nn.Linear) -> None:
    layer.weight.grad = layer.weight.detach().clone()
    qsync_fx.optim.SGD([layer.weight], lr=2.0).step()


def copied(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(-layer.weight)


def taken_apart(layer: nn.Linear) -> None:
    layer.weight.detach().numpy()[:] *= -1


def moved(layer: nn.Linear) -> None:
    layer.weight.data = -layer.weight.data


COUNTED: Final[Mapping[str, Write]] = {
    "a step": stepped,
    "copy_": copied,
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": -layer.weight.detach()}),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict(
        {"weight": -layer.weight.detach()}, assign=True
    ),
    "another .data": moved,
    "a new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(-layer.weight.detach())),
}
"""Writes that change the version, the address or the tensor object."""

UNCOUNTED: Final[Mapping[str, Write]] = {
    "through .data": lambda layer: layer.weight.data.neg_(),
    "through numpy": taken_apart,
}
"""Writes that change none of them."""
