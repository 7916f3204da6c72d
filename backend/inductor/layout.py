"""Where the images of convolutions keep the layout that they come in: on a CPU, where there is far more of weights than of images.

Inductor has a CPU's convolutions read channels last, images and weights alike. Weights that a user made, with channels first, are so laid
out anew in every step, value by value, with their gradients, and oneDNN lays them out once more as its kernel wants them. Of a ResNet-18
with 8 images of 32 x 32 that was a quarter of the step (AVX512-BF16, torch 2.13).

Invariant: it says how tensors lie and changes no value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, fx

import qsync_fx.backend.operators.convolution  # noqa: F401 - registers the operators
from qsync_fx.precision import precision

_OURS: Final = torch.ops.qsync.convolution.default
_CONVOLUTIONS: Final = (
    torch.ops.aten.conv2d.default,
    torch.ops.aten.convolution.default,
    torch.ops.qsync.padded_convolution.default,
    _OURS,
)
_SPATIAL: Final = 4
"""Dimensions of images and of their weights."""
FAR: Final = 4
"""How many values of weights for one of images are far more: with about as many of both a step took as long either way."""


def settings(device: torch.device, module: fx.GraphModule) -> dict[str, bool]:
    """Returns the settings of `torch._inductor.config` for how a graph's images lie on a device."""
    return {"layout_optimization": False} if device.type == "cpu" and as_it_comes(module) else {}


def as_it_comes(module: fx.GraphModule) -> bool:
    """Returns whether Inductor is to leave the images of a graph's convolutions as they lie.

    Kernels of ours read channels last. Where they compute both products of a backward pass, too, images are laid out for all; where
    they compute the output alone, less is laid out anew in front of them than weights are.
    """
    if any(_scales_gradients(node) for node in module.graph.nodes):
        return False
    images = weights = 0
    for image, weight in _operands(module.graph):
        if not all(isinstance(size, int) for size in (*image.shape, *weight.shape)):
            return False
        images, weights = images + image.numel(), weights + weight.numel()
    return weights >= FAR * images > 0


def _scales_gradients(node: fx.Node) -> bool:
    """Returns whether a node is a convolution of ours whose gradients are rounded to a format that has scales."""
    if node.target is not _OURS:
        return False
    names = [argument.name for argument in _OURS._schema.arguments]
    return precision(str(node.args[names.index("fmt")])).gradient.scaled


def _operands(graph: fx.Graph) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields what each convolution of images multiplies, as far as their shapes are known."""
    for node in graph.nodes:
        if node.target in _CONVOLUTIONS:
            image, weight = (_value(arg) for arg in node.args[:2])
            if image is not None and weight is not None and image.dim() == weight.dim() == _SPATIAL:
                yield image, weight


def _value(arg: object) -> Tensor | None:
    found = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    return found if isinstance(found, Tensor) else None
