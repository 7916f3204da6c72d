"""Gradients of weights lie in memory as the weights do.

autograd copies a gradient that lies otherwise, value by value: Inductor's forward pass keeps images with channels last, from which
gradients of a convolution's weights come out so, and the weights of most models have them first. That was a fifth of the step of a
ResNet-18 with small images. Inductor itself writes a gradient as it is asked to in the loop that makes FP32 of it.

Invariant: it is a joint graph's pass that says how outputs lie and changes no value; what is no gradient of an input stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

_SPATIAL = (4, 5)
"""Dimensions of weights whose channels may come first or last."""


class AsWeights(CustomGraphPass):
    """Asks for gradients in the layout of what they are of; runs another pass first, of which a joint graph has one."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        given = graph.find_nodes(op="placeholder")
        inputs = [node for node in given if node.name.startswith("primals")]
        # A graph for inference has no tangents. Behind what the model returns come gradients, one an input.
        if not any(node.name.startswith("tangents") for node in given):
            return
        output = graph.output_node()
        returned: Any = output.args[0]
        found, first = list(returned), len(returned) - len(inputs)
        for at, weight in enumerate(inputs, first):
            if first >= 0 and _may_differ(weight, found[at]):
                found[at] = _laid(graph, found[at], weight.meta["val"].stride())
        output.args = (type(returned)(found),)

    def uuid(self) -> Any:
        own = get_hash_for_files((__file__,))
        return own if self.before is None else (own, self.before.uuid())


def _may_differ(weight: fx.Node, gradient: Any) -> bool:
    if not isinstance(gradient, fx.Node):
        return False
    of, value = weight.meta.get("val"), gradient.meta.get("val")
    if not (isinstance(of, torch.Tensor) and isinstance(value, torch.Tensor)) or of.dim() not in _SPATIAL:
        return False
    known = all(type(size) is int for size in (*of.shape, *of.stride(), *value.shape))
    return known and of.shape == value.shape and of.is_contiguous() | _channels_last(of)


def _channels_last(value: torch.Tensor) -> bool:
    last = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
    return value.is_contiguous(memory_format=last)


def _laid(graph: fx.Graph, gradient: fx.Node, stride: Sequence[int]) -> fx.Node:
    value = gradient.meta["val"]
    with graph.inserting_after(gradient):
        laid = graph.call_function(
            torch.ops.prims.inductor_force_stride_order.default, (gradient, list(stride)), name=f"{gradient.name}_laid"
        )
    laid.meta["val"] = value.new_empty_strided(value.shape, stride)
    for key in ("partitioner_tag", "autograd_backward", "seq_nr"):
        if key in gradient.meta:
            laid.meta[key] = gradient.meta[key]
    return laid
