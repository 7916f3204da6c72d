"""Grouped and depthwise convolutions, which are left to oneDNN: its BF16 beside its FP32, the three products each.

Beside them a copy of what they read and write in BF16 ("copy"): no kernel that goes over memory once is much faster than that. Gradients
that are slow in BF16 are measured as this backend has them computed, too, with what is converted for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.kernels.bf16_products import PEER
from qsync_fx.backend.inductor import layouts

BF16 = torch.bfloat16
Cases = Mapping[str, Callable[[], object]]

GROUPED = {
    "MobileNetV2": (
        (96, 56, 96, 3, 2, 96),
        (144, 56, 144, 3, 1, 144),
        (384, 14, 384, 3, 1, 384),
        (576, 14, 576, 3, 2, 576),
        (960, 7, 960, 3, 1, 960),
    ),
    "EfficientNet-B0": ((144, 56, 144, 5, 2, 144), (480, 14, 480, 5, 1, 480)),
    "ConvNeXt": ((96, 56, 96, 7, 1, 96), (384, 14, 384, 7, 1, 384)),
    "ResNeXt-50": ((128, 56, 128, 3, 1, 32), (256, 28, 256, 3, 1, 32), (512, 14, 512, 3, 1, 32)),
    "small": (
        (32, 8, 32, 3, 1, 32),
        (64, 16, 64, 3, 1, 64),
        (64, 16, 64, 3, 1, 4),
        (256, 4, 256, 3, 1, 256),
    ),
}
"""Input channels, side of the image, output channels, side of the kernel, stride, groups; batches of eight."""
BATCH = 8


def layers(quick: bool) -> Iterator[tuple[str, float, dict[str, Cases]]]:
    """Yields the name of each layer, the operations of one product, and what is measured, by product; a layer a model if quick."""
    for model, of_model in GROUPED.items():
        for layer in of_model[:1] if quick else of_model:
            inner, side, channels, kernel, stride, groups = layer
            work = 2 * BATCH * (side // stride) ** 2 * (inner // groups) * channels * kernel**2
            name = f"{model} {inner}x{side}x{side} to {channels}, {kernel}x{kernel}, stride {stride}, {groups} groups"
            yield name, work, cases(*layer)


def cases(
    inner: int, side: int, channels: int, kernel: int, stride: int, groups: int
) -> dict[str, Cases]:
    padding = kernel // 2
    out = (side + 2 * padding - kernel) // stride + 1
    shapes = (
        (BATCH, inner, side, side),
        (channels, inner // groups, kernel, kernel),
        (BATCH, channels, out, out),
    )
    wide = tuple(
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in shapes
    )
    rest = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups

    def forward(tensors: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        x, weight, _ = tensors
        return lambda: torch.ops.aten.convolution.default(x, weight, None, *rest)

    def backward(tensors: tuple[Tensor, ...], of_input: bool) -> Callable[[], object]:
        x, weight, gradient = tensors
        mask = [of_input, not of_input, False]
        return lambda: torch.ops.aten.convolution_backward.default(
            gradient, x, weight, None, *rest, mask
        )

    narrow = tuple(t.to(BF16) for t in wide)
    x, weight, gradient = narrow
    copy = {"copy": lambda: (x.clone(), gradient.clone())}

    def converted(of_input: bool) -> Cases:
        """What Inductor is given in place of a gradient that is slow in BF16."""
        mask = [of_input, not of_input, False]
        arguments = gradient, x, weight, None, *rest, mask
        slow = layouts.slow(weight, [stride] * 2, False, groups)[not of_input]
        return (
            {"bf16 by way of fp32": lambda: layouts.convolution_backward(*arguments)}
            if slow
            else {}
        )

    return {
        "forward": {PEER: forward(narrow), "fp32": forward(wide), **copy},
        "input gradient": {
            PEER: backward(narrow, True),
            "fp32": backward(wide, True),
            **copy,
            **converted(True),
        },
        "weight gradient": {
            PEER: backward(narrow, False),
            "fp32": backward(wide, False),
            **copy,
            **converted(False),
        },
    }
