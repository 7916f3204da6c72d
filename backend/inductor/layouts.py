"""Layout decisions on the CPU: weight gradients, depthwise gradients, images of convolutions.

- `AsWeights` gives weight gradients the layout of their weights. autograd copies other layouts
  value by value: Inductor's convolutions yield channels-last gradients, most weights are
  channels-first (a fifth of a ResNet-18 step with small images).
- `convolution_backward` computes depthwise gradients for which oneDNN has no fast kernel in FP32
  and channels-last (`benchmarks/kernels/cpu_kernels.py --only grouped`). They are at least as
  exact: sums are rounded once.
- `settings` disables Inductor's channels-last layout if weights far outweigh images: it would
  convert the weights and gradients in every step, and oneDNN once more (a quarter of the step of a
  ResNet-18 with 8 images of 32 x 32).

Except for the depthwise gradients, only layouts change, no values.
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
"""Ranks of weights with channels first or last."""


class AsWeights(CustomGraphPass):
    """Joint-graph pass that gives weight gradients the layout of their weights.

    It runs the pass `before` first, since Inductor has one slot for such passes.
    """

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        arguments = graph.find_nodes(op="placeholder")
        inputs = [node for node in arguments if node.name.startswith("primals")]
        # Inference graphs have no tangents. The last outputs are gradients, one per input.
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
"""Longest kernel side from which on oneDNN's weight gradient is slow."""


def slow(weight: Tensor, stride: Sequence[int], transposed: bool, groups: int) -> tuple[bool, bool]:
    """Return whether oneDNN is slow for a convolution's input gradient and for its weight gradient.

    The input gradient is slow in BF16 with strides above 1: 7 to 113 times FP32's time. The weight
    gradient is slow for kernels of 5 x 5 and larger: 1.5 to 3.5 times in BF16, and also in FP32 in
    Inductor's layouts (AVX512-BF16, torch 2.13).

    Args:
        weight: `[C, 1, R, S]` if depthwise; other weights give (False, False).
        stride, transposed, groups: of the convolution.
    """
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
    """Decompose `aten::convolution_backward`: slow gradients by ours, the others unchanged."""
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
        # oneDNN computes the bias gradient with the weight gradient, which would run again for it.
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
FAR: Final = 4
"""Ratio of weight to image values for channels-first; at about 1 both layouts are equally fast."""


def settings(device: torch.device, module: fx.GraphModule) -> dict[str, bool]:
    """Return the settings of `torch._inductor.config` for the image layout of a graph."""
    return {"layout_optimization": False} if device.type == "cpu" and as_it_comes(module) else {}


def as_it_comes(module: fx.GraphModule) -> bool:
    """Return whether Inductor should preserve the layout of a graph's images.

    Our kernels read channels-last. If they compute the backward products too, images are converted
    for all of them; if they compute only the output, those copies are smaller than copies of
    weights.
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
    """Return whether a node is our convolution with a scaled gradient format."""
    if node.target is not _OURS:
        return False
    names = [argument.name for argument in _OURS._schema.arguments]
    return precision(str(node.args[names.index("fmt")])).gradient.scaled


def _operands(graph: fx.Graph) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and weights of each 2-D convolution with known shapes."""
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
