"""Grouped and depthwise convolutions, which the backend leaves to oneDNN: BF16 compared with FP32.

`cpu_kernels.py --only grouped` runs these cases. "copy" copies the BF16 activation and output
gradient: a lower bound of the time of a memory-bound kernel. Gradients that are slow in BF16 are
also measured as the backend computes them, with their conversions ("bf16 by way of fp32").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.kernels.bf16_products import PEER
from benchmarks.support.harness import by_size
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
"""Input channels, height and width, output channels, kernel size, stride, groups."""
BATCH = 8


def layers(quick: bool) -> Iterator[tuple[str, float, dict[str, Cases]]]:
    """Yield each layer's name, operations per product, and cases by product.

    With `quick`, only the first layer of each model.
    """
    for model, of_model in GROUPED.items():
        for layer in by_size(quick, of_model[:1], of_model):
            inner, side, channels, kernel, stride, groups = layer
            work = 2 * BATCH * (side // stride) ** 2 * (inner // groups) * channels * kernel**2
            name = (
                f"{model} {inner}x{side}x{side} to {channels}, {kernel}x{kernel}, stride "
                f"{stride}, {groups} groups"
            )
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
        """Return the backend's replacement for a gradient that is slow in BF16."""
        mask = [of_input, not of_input, False]
        arguments = gradient, x, weight, None, *rest, mask
        slow = layouts.slow(weight, [stride] * 2, False, groups)[not of_input]
        if not slow:
            return {}
        return {"bf16 by way of fp32": lambda: layouts.convolution_backward(*arguments)}

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
