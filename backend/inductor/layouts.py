"""Layout decisions on the CPU: weight gradients, depthwise gradients, images of convolutions.

Depthwise gradients for which oneDNN has no fast kernel are computed in FP32 and channels-last: they
are at least as exact, since sums are rounded once. Otherwise only layouts change, no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

import qsync_fx.backend.operators.convolution  # noqa: F401 - registers the operators
from qsync_fx.backend.operators.convert import convolution_format
from qsync_fx.backend.operators.registration import define
from qsync_fx.formats import precision
from qsync_fx.graph.fx_utils import arguments
from qsync_fx.torch_internals import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten


class AsWeights(CustomGraphPass):
    """Joint-graph pass that gives weight gradients the layout of their weights, after `before`.

    autograd copies other layouts value by value. Inductor has one slot for such passes.
    """

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        placeholders = graph.find_nodes(op="placeholder")
        inputs = [node for node in placeholders if node.name.startswith("primals")]
        # Inference graphs have no tangents. The last outputs are gradients, one per input.
        if not any(node.name.startswith("tangents") for node in placeholders):
            return
        output = graph.output_node()
        returned: Any = output.args[0]
        result, first = list(returned), len(returned) - len(inputs)
        for index, weight in enumerate(inputs, first):
            if first >= 0 and _may_differ(weight, result[index]):
                result[index] = _laid_out(graph, result[index], weight.meta["val"].stride())
        output.args = (type(returned)(result),)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,)), self.before and self.before.uuid()


def _may_differ(weight: fx.Node, gradient: Any) -> bool:
    of, value = _value(weight), _value(gradient)
    if of is None or value is None or of.dim() not in (4, 5) or of.shape != value.shape:
        return False
    if not all(type(size) is int for size in (*of.shape, *of.stride(), *value.shape)):
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[of.dim()]
    return of.is_contiguous() or of.is_contiguous(memory_format=last)


def _laid_out(graph: fx.Graph, gradient: fx.Node, stride: Sequence[int]) -> fx.Node:
    value = gradient.meta["val"]
    with graph.inserting_after(gradient):
        result = graph.call_function(
            torch.ops.prims.inductor_force_stride_order.default,
            (gradient, list(stride)),
            name=f"{gradient.name}_laid",
        )
    result.meta["val"] = value.new_empty_strided(value.shape, stride)
    for key in ("partitioner_tag", "autograd_backward", "seq_nr"):
        if key in gradient.meta:
            result.meta[key] = gradient.meta[key]
    return result


LARGE: Final = 5
"""Longest kernel side from which on oneDNN's weight gradient is slow."""


def slow(weight: Tensor, stride: Sequence[int], transposed: bool, groups: int) -> tuple[bool, bool]:
    """Return whether oneDNN is slow for a convolution's input gradient and for its weight gradient.

    The input gradient is slow in BF16 with strides above 1, the weight gradient for kernels of 5 x
    5 and larger, in BF16 and in Inductor's layouts also in FP32 (AVX512-BF16, torch 2.13;
    `benchmarks/kernels/grouped_convolutions.py`). A depthwise weight is `[C, 1, R, S]`.
    """
    supported = weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32)
    if not supported or weight.dim() != 4 or transposed:
        return False, False
    if weight.shape[1] != 1 or not weight.shape[0] == groups > 1:
        return False, False
    return weight.dtype is torch.bfloat16 and max(stride) > 1, max(weight.shape[2:]) >= LARGE


def convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    needed: Sequence[bool],
) -> Any:
    """Decompose `aten::convolution_backward`: slow gradients by ours, the others unchanged."""
    is_slow = slow(weight, stride, transposed, groups)
    ours = [a and b for a, b in zip(needed, is_slow, strict=False)]
    if not any(ours):
        return NotImplemented
    computed = depthwise_gradients(gradient, x, weight, stride, padding, dilation, ours)
    layout = convolution_format(x, weight)
    gradients: list[Tensor | None] = [None, None, None]
    for index in range(2):
        if ours[index]:
            gradients[index] = computed[index].contiguous(memory_format=layout)
    others = [needed[0] and not ours[0], needed[1] and not ours[1], needed[2]]
    if others[2] and not others[1]:
        # oneDNN computes the bias gradient with the weight gradient, which would run again for it.
        total = gradient.sum((0, 2, 3), dtype=torch.float32)
        others[2], gradients[2] = False, total.to(gradient.dtype)
    if any(others):
        rest = bias_sizes, stride, padding, dilation, transposed, output_padding, groups
        theirs = aten.convolution_backward.default(gradient, x, weight, *rest, others)
        for index in range(3):
            if others[index]:
                gradients[index] = theirs[index]
    return tuple(gradients)


def _depthwise_fake(
    gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    of_x, of_weight = x.new_empty(0), weight.new_empty(0)
    need_x, need_weight = rest[-1]
    if need_x:
        of_x = torch.empty_like(x, memory_format=torch.channels_last)
    if need_weight:
        of_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    return of_x, of_weight


@define(
    "depthwise_gradients(Tensor gradient, Tensor x, Tensor weight, SymInt[] stride, SymInt[] "
    "padding, SymInt[] dilation, bool[2] needed) -> (Tensor, Tensor)",
    fake=_depthwise_fake,
)
def depthwise_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Return the input and weight gradients of a depthwise convolution, empty if not needed.

    They are computed in FP32 and channels-last, where oneDNN is fast, and rounded once.

    Args:
        gradient: `[N, C, H', W']`, BF16 or FP32, like `x`, `[N, C, H, W]`, and `weight`.
        rest: stride, padding and dilation of the convolution, and whether each gradient is needed.

    Returns:
        `[N, C, H, W]`, channels-last, and `[C, 1, R, S]`, contiguous.
    """
    *window, needed = rest
    wide = [t.to(torch.float32, memory_format=torch.channels_last) for t in (gradient, x)]
    settings = None, *window, False, [0, 0], weight.shape[0], [*needed, False]
    of_x, of_weight, _ = aten.convolution_backward.default(*wide, weight.float(), *settings)
    results = _depthwise_fake(gradient, x, weight, needed)
    for result, value in zip(results, (of_x, of_weight), strict=True):
        if value is not None:
            result.copy_(value)
    return results


_OURS: Final = torch.ops.qsync.convolution.default
_CONVOLUTIONS: Final = (
    aten.conv2d.default,
    aten.convolution.default,
    torch.ops.qsync.padded_convolution.default,
    _OURS,
)
FAR: Final = 4
"""Ratio of weight to image values for channels-first; at about 1 both layouts are equally fast."""


def settings(device: torch.device, module: fx.GraphModule) -> dict[str, bool]:
    """Return the settings of `torch._inductor.config` for the image layout of a graph."""
    if device.type == "cpu" and as_it_comes(module):
        return {"layout_optimization": False}
    return {}


def as_it_comes(module: fx.GraphModule) -> bool:
    """Return whether Inductor should preserve the layout of a graph's images.

    Channels-last would convert the weights and gradients in every step. Our kernels read it: if
    they compute the backward products too, images are converted for all of them.
    """
    ours = module.graph.find_nodes(op="call_function", target=_OURS)
    if any(precision(arguments(node)["fmt"]).gradient.scaled for node in ours):
        return False
    images = weights = 0
    for image, weight in _operands(module.graph):
        if not all(isinstance(size, int) for size in (*image.shape, *weight.shape)):
            return False
        images, weights = images + image.numel(), weights + weight.numel()
    return weights >= FAR * images > 0


def _operands(graph: fx.Graph) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and weights of each 2-D convolution with known shapes."""
    for node in graph.nodes:
        if node.target in _CONVOLUTIONS:
            image, weight = (_value(arg) for arg in node.args[:2])
            if image is not None and weight is not None and image.dim() == weight.dim() == 4:
                yield image, weight


def _value(arg: object) -> Tensor | None:
    result = getattr(arg, "meta", {}).get("val")
    return result if isinstance(result, Tensor) else None
