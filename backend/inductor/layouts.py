"""Gradients of weights lie in memory as the weights do.

autograd copies a gradient that lies otherwise, value by value: Inductor's forward pass keeps images with channels last, from which
gradients of a convolution's weights come out so, and the weights of most models have them first. That was a fifth of the step of a
ResNet-18 with small images. Inductor itself writes a gradient as it is asked to in the loop that makes FP32 of it.

Invariant: it is a joint graph's pass that says how outputs lie and changes no value; what is no gradient of an input stays as it was.

Which gradients of a depthwise convolution a CPU computes in FP32 with channels last: those that oneDNN has no fast kernel for.

The input gradient in BF16 of one that moves by more than one took 7 to 113 times as long as in FP32, and the weight gradient of one of
5 x 5 or 7 x 7 values 1.5 to 3.5 times; in FP32, with conversions, they take 0.03 to 0.66 of BF16's time. All else took 0.3 to 1.1 of
FP32's time, and so did convolutions in larger groups (`benchmarks/kernels/cpu_kernels.py --only grouped`; AVX512-BF16, torch 2.13).

Invariant: what is computed so is at least as exact: the same values are multiplied, and sums are rounded once.

Where the images of convolutions keep the layout that they come in: on a CPU, where there is far more of weights than of images.

Inductor has a CPU's convolutions read channels last, images and weights alike. Weights that a user made, with channels first, are so laid
out anew in every step, value by value, with their gradients, and oneDNN lays them out once more as its kernel wants them. Of a ResNet-18
with 8 images of 32 x 32 that was a quarter of the step (AVX512-BF16, torch 2.13).

Invariant: it says how tensors lie and changes no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import qsync_fx.backend.operators.convolution  # noqa: F401 - registers the operators
from qsync_fx.backend.operators.conv_gradients import depthwise_gradients
from qsync_fx.backend.operators.memory_order import convolution_format
from qsync_fx.formats import precision

_SPATIAL = (4, 5)
"""Dimensions of weights whose channels may come first or last."""


class AsWeights(CustomGraphPass):
    """Asks for gradients in the layout of what they are of; runs another pass first, of which a joint graph has one."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        arguments = graph.find_nodes(op="placeholder")
        inputs = [node for node in arguments if node.name.startswith("primals")]
        # A graph for inference has no tangents. Behind what the model returns come gradients, one an input.
        if not any(node.name.startswith("tangents") for node in arguments):
            return
        output = graph.output_node()
        returned: Any = output.args[0]
        result, first = list(returned), len(returned) - len(inputs)
        for index, weight in enumerate(inputs, first):
            if first >= 0 and _may_differ(weight, result[index]):
                result[index] = _laid(graph, result[index], weight.meta["val"].stride())
        output.args = (type(returned)(result),)

    def uuid(self) -> Any:
        owned = get_hash_for_files((__file__,))
        return owned if self.before is None else (owned, self.before.uuid())


def _may_differ(weight: fx.Node, gradient: Any) -> bool:
    if not isinstance(gradient, fx.Node):
        return False
    of, value = weight.meta.get("val"), gradient.meta.get("val")
    if (
        not (isinstance(of, torch.Tensor) and isinstance(value, torch.Tensor))
        or of.dim() not in _SPATIAL
    ):
        return False
    available = all(type(size) is int for size in (*of.shape, *of.stride(), *value.shape))
    return available and of.shape == value.shape and of.is_contiguous() | _channels_last(of)


def _channels_last(value: torch.Tensor) -> bool:
    last = torch.channels_last if value.dim() == 4 else torch.channels_last_3d
    return value.is_contiguous(memory_format=last)


def _laid(graph: fx.Graph, gradient: fx.Node, stride: Sequence[int]) -> fx.Node:
    value = gradient.meta["val"]
    with graph.inserting_after(gradient):
        laid = graph.call_function(
            torch.ops.prims.inductor_force_stride_order.default,
            (gradient, list(stride)),
            name=f"{gradient.name}_laid",
        )
    laid.meta["val"] = value.new_empty_strided(value.shape, stride)
    for key in ("partitioner_tag", "autograd_backward", "seq_nr"):
        if key in gradient.meta:
            laid.meta[key] = gradient.meta[key]
    return laid


LARGE: Final = 5
"""Values of the longer side of a kernel from which on the weight gradient is."""


def slow(weight: Tensor, stride: Sequence[int], transposed: bool, groups: int) -> tuple[bool, bool]:
    """Returns whether oneDNN has no fast kernel for the input gradient, and for the weight gradient, of a convolution as Inductor gives
    it: in BF16, and of large kernels in FP32 as well, whose operands it lays out badly."""
    if (
        weight.dim() != 4
        or weight.dtype not in (torch.bfloat16, torch.float32)
        or weight.device.type != "cpu"
    ):
        return False, False
    if transposed or weight.shape[1] != 1 or not weight.shape[0] == groups > 1:
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
    """The decomposition: what is slow by an operator of ours, and what is not as it was."""
    wide = slow(weight, stride, transposed, groups)
    in_fp32 = [a and b for a, b in zip(needed, wide, strict=False)]
    if not any(in_fp32):
        return NotImplemented
    wide_gradients = depthwise_gradients(gradient, x, weight, stride, padding, dilation, in_fp32)
    layout = convolution_format(x, weight)
    gradients = [
        None if t is None else t.contiguous(memory_format=layout) for t in (*wide_gradients, None)
    ]
    others = [a and not b for a, b in zip(needed, [*in_fp32, False], strict=True)]
    if others[2] and not others[1]:
        # oneDNN has the bias's gradient from the kernel of the weight's, which would run once more for it.
        others[2], gradients[2] = (
            False,
            gradient.sum((0, 2, 3), dtype=torch.float32).to(gradient.dtype),
        )
    if any(others):
        rest = bias_sizes, stride, padding, dilation, transposed, output_padding, groups
        narrow = torch.ops.aten.convolution_backward.default(gradient, x, weight, *rest, others)
        pairs = zip(narrow, gradients, strict=True)
        gradients = [new if of_fp32 is None else of_fp32 for new, of_fp32 in pairs]
    return tuple(gradients)


_OURS: Final = torch.ops.qsync.convolution.default
_CONVOLUTIONS: Final = (
    torch.ops.aten.conv2d.default,
    torch.ops.aten.convolution.default,
    torch.ops.qsync.padded_convolution.default,
    _OURS,
)
_CONV2D_RANK: Final = 4
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
            if (
                image is not None
                and weight is not None
                and image.dim() == weight.dim() == _CONV2D_RANK
            ):
                yield image, weight


def _value(arg: object) -> Tensor | None:
    result = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    return result if isinstance(result, Tensor) else None
