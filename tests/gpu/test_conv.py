"""Convolution kernels of this GPU: exact sums bit by bit, random data within the kernel's roundings
of FP64.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem
from qsync_fx.backend.cuda.problem.problem import ConvProduct
from qsync_fx.backend.cuda.runtime import launch
from qsync_fx.backend.operators.gemm.gemm import conv2d_product
from tests.gpu import kit
from tests.gpu.geometries import problems

CONFIGS = kit.configs("fprop", "dgrad", "wgrad")
each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


def operands(p: ConvProblem, draw: object) -> tuple[Tensor, Tensor]:
    """Return both operands in torch's shapes, channels-last in memory."""
    x, weight, y = (p.n, p.h, p.w, p.c), (p.k, p.r, p.s, p.c), (p.n, p.p, p.q, p.k)
    shapes = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
    a, b = (
        draw(fmt, shape, kit.DEVICE).permute(0, 3, 1, 2)
        for fmt, shape in zip((p.a, p.b), shapes, strict=True)
    )  # type: ignore[operator]
    return a, b


def epilogue(p: ConvProblem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return a's scale, b's scale and the bias that a problem requires, None for others."""
    scalar = functools.partial(torch.rand, (), device=kit.DEVICE)
    per_channel = functools.partial(torch.rand, (1, p.k, 1, 1), device=kit.DEVICE)
    a_scale = scalar() + 0.5 if p.a_scale != "none" else None
    b_scale = (
        None
        if p.b_scale == "none"
        else (per_channel() if p.b_scale == "channel" else scalar()) + 0.5
    )
    return a_scale, b_scale, torch.randn(p.k, device=kit.DEVICE) if p.bias else None


def flat(scales_and_bias: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return scales and bias in shapes that broadcast against trailing channels."""
    return tuple(None if t is None else t.reshape(-1) if t.dim() else t for t in scales_and_bias)


def run(
    config: KernelConfig,
    p: ConvProblem,
    a: Tensor,
    b: Tensor,
    scales_and_bias: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """Return the result, channels last, in memory that most likely contained NaN before."""
    poison = torch.full(
        (kit.convolved_size(p),), torch.nan, dtype=kit.FORMATS[config.out].dtype, device=kit.DEVICE
    )
    del poison
    library = kit.library(codegen.unit_of(config))
    size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
    x = ConvProduct(a, b, *scales_and_bias, size, p.stride, p.padding, p.dilation, p.operation)
    return launch.call_site(library, config, p, p, x)(x).permute(0, 2, 3, 1)


@each
def test_exact_sums_are_right_to_the_last_bit(config: KernelConfig) -> None:
    for p in problems(config):
        a, b = operands(p, kit.whole_numbers)
        scales_and_bias = epilogue(p)
        kit.assert_equal(
            run(config, p, a, b, scales_and_bias),
            kit.convolved(p, a, b),
            config,
            *flat(scales_and_bias),
        )


@each
def test_random_data_against_fp64(config: KernelConfig) -> None:
    for p in problems(config):
        a, b = operands(p, kit.random_numbers)
        scales_and_bias = epilogue(p)
        sums, magnitudes = (
            kit.convolved(p, a, b),
            kit.convolved(p, kit.wide(a).abs(), kit.wide(b).abs()),
        )
        terms = {"fprop": p.r * p.s * p.c, "dgrad": p.r * p.s * p.k, "wgrad": p.n * p.p * p.q}[
            p.operation
        ]
        kit.assert_near(
            run(config, p, a, b, scales_and_bias),
            sums,
            magnitudes,
            terms,
            config,
            *flat(scales_and_bias),
        )


@pytest.mark.parametrize("fmt", kit.each_of("int8", "bf16", "fp16", "tf32"))
@pytest.mark.parametrize("operation", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("channels", [(64, 128), (3, 20)])
def test_operator_supports_any_channels_and_layout(
    fmt: str, operation: str, channels: tuple[int, int]
) -> None:
    """`qsync::conv2d_product` with contiguous NCHW tensors of odd sizes, and `a` not aligned to 16
    bytes.
    """
    (c, k), (h, w) = channels, (13, 10)
    x, weight, y = (5, c, h, w), (k, c, 3, 3), (5, k, 7, 5)
    shapes = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[operation]
    size = {"fprop": [3, 3], "dgrad": [h, w], "wgrad": [3, 3]}[operation]
    a, b = (kit.whole_numbers(fmt, shape, kit.DEVICE) for shape in shapes)
    a = torch.cat([a.flatten()[:1], a.flatten()])[1:].view(a.shape)
    settings = size, [2, 2], [1, 1], [1, 1], operation, torch.float32, fmt == "tf32"
    result = conv2d_product(a, b, None, None, None, *settings)
    want = conv2d_product(a.cpu(), b.cpu(), None, None, None, *settings)
    assert result.is_contiguous(memory_format=torch.channels_last)
    # When torch computes, results in a 16-bit compute dtype are rounded to it.
    assert torch.allclose(result.cpu(), want, rtol=2.0**-8, atol=1e-4 * float(want.abs().max()))
