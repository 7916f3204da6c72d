"""Masks of attention that a GPU's fused kernels take.

They read a mask along the keys, and want those beside one another in memory. One that is the same for all keys, as models make it where
nothing is masked at all, is a view with a stride of zero there: torch then computes attention by products in FP32, with masks and weights
of dropout in memory.

Invariant: the values of a mask stay as they are, and so does each dimension along which it is repeated, but for the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.attention import FUSED

_MASK = 3
"""Its place among the arguments."""
aten = torch.ops.aten


def lay_out_masks(graph: PrecisionGraph) -> None:
    """Writes masks anew that lie otherwise, in a graph that has been lowered, on a GPU."""
    if not _read_so(graph.context.device):
        return
    changed = False
    for node in graph.nodes:
        if node.target is not FUSED:
            continue
        given = node.args[_MASK] if len(node.args) > _MASK else node.kwargs.get("attn_mask")
        if isinstance(given, fx.Node) and _lies_otherwise(mask := graph.value(given)):
            node.replace_input_with(given, _laid_out(graph, node, given, mask))
            changed = True
    if changed:
        graph.module.recompile()


def _read_so(device: torch.device) -> bool:
    return device.type == "cuda"


def _lies_otherwise(mask: object) -> bool:
    # Sizes that are symbols may be one, where strides are nothing to a kernel; a mask that is trained has a gradient as it lies.
    if not isinstance(mask, Tensor) or mask.requires_grad or not all(isinstance(size, int) for size in mask.shape):
        return False
    return mask.shape[-1] > 1 and mask.stride(-1) != 1


def _laid_out(graph: PrecisionGraph, node: fx.Node, given: fx.Node, mask: Tensor) -> fx.Node:
    """Returns the mask with its keys beside one another."""
    found = given

    def call(target: object, *args: object, **kwargs: object) -> None:
        nonlocal found
        found = graph.graph.call_function(target, (found, *args), kwargs)  # type: ignore[arg-type]
        graph.propagate(found)

    with graph.graph.inserting_before(node):
        for dim, stride in enumerate(mask.stride()[:-1]):
            if stride == 0 and mask.shape[dim] > 1:
                call(aten.slice.Tensor, dim, 0, 1)
        call(aten.clone.default, memory_format=torch.contiguous_format)
        call(aten.expand.default, list(mask.shape))
    return found
