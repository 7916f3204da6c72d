"""Every convolution kernel of this GPU: to the last bit where sums are exact, within its roundings
of FP64 on random data.
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
    """Returns both operands as torch shapes them, their channels last in memory."""
    x, weight, y = (p.n, p.h, p.w, p.c), (p.k, p.r, p.s, p.c), (p.n, p.p, p.q, p.k)
    shapes = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
    a, b = (
        draw(fmt, shape, kit.DEVICE).permute(0, 3, 1, 2)
        for fmt, shape in zip((p.a, p.b), shapes, strict=True)
    )  # type: ignore[operator]
    return a, b


def epilogue(p: ConvProblem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns a's scale, b's and the bias, as the problem says that there are."""
    one = functools.partial(torch.rand, (), device=kit.DEVICE)
    many = functools.partial(torch.rand, (1, p.k, 1, 1), device=kit.DEVICE)
    a_scale = one() + 0.5 if p.a_scale != "none" else None
    b_scale = None if p.b_scale == "none" else (many() if p.b_scale == "channel" else one()) + 0.5
    return a_scale, b_scale, torch.randn(p.k, device=kit.DEVICE) if p.bias else None


def flat(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Scales and bias as they broadcast against channels that lie last."""
    return tuple(None if t is None else t.reshape(-1) if t.dim() else t for t in given)


def run(
    config: KernelConfig,
    p: ConvProblem,
    a: Tensor,
    b: Tensor,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Tensor:
    """Returns the result, channels last. The memory that it will most likely get is NaN before."""
    poison = torch.full(
        (kit.convolved_size(p),), torch.nan, dtype=kit.FORMATS[config.out].dtype, device=kit.DEVICE
    )
    del poison
    library = kit.library(codegen.unit_of(config))
    size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
    x = ConvProduct(a, b, *given, size, p.stride, p.padding, p.dilation, p.operation)
    return launch.call_site(library, config, p, p, x)(x).permute(0, 2, 3, 1)


@each
def test_exact_sums_are_right_to_the_last_bit(config: KernelConfig) -> None:
    for p in problems(config):
        a, b = operands(p, kit.whole_numbers)
        given = epilogue(p)
        kit.assert_equal(run(config, p, a, b, given), kit.convolved(p, a, b), config, *flat(given))


@each
def test_random_data_against_fp64(config: KernelConfig) -> None:
    for p in problems(config):
        a, b = operands(p, kit.random_numbers)
        given = epilogue(p)
        sums, magnitudes = (
            kit.convolved(p, a, b),
            kit.convolved(p, kit.wide(a).abs(), kit.wide(b).abs()),
        )
        terms = {"fprop": p.r * p.s * p.c, "dgrad": p.r * p.s * p.k, "wgrad": p.n * p.p * p.q}[
            p.operation
        ]
        kit.assert_near(run(config, p, a, b, given), sums, magnitudes, terms, config, *flat(given))


@pytest.mark.parametrize("fmt", kit.each_of("int8", "bf16", "fp16", "tf32"))
@pytest.mark.parametrize("operation", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("channels", [(64, 128), (3, 20)])
def test_operator_supports_any_channels_and_layout(
    fmt: str, operation: str, channels: tuple[int, int]
) -> None:
    """`qsync::conv2d_product` on tensors with channels first, of odd sizes, one of them starting
    between two multiples of 16 bytes.
    """
    (c, k), (h, w) = channels, (13, 10)
    x, weight, y = (5, c, h, w), (k, c, 3, 3), (5, k, 7, 5)
    shapes = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[operation]
    size = {"fprop": [3, 3], "dgrad": [h, w], "wgrad": [3, 3]}[operation]
    a, b = (kit.whole_numbers(fmt, shape, kit.DEVICE) for shape in shapes)
    a = torch.cat([a.flatten()[:1], a.flatten()])[1:].view(a.shape)
    how = size, [2, 2], [1, 1], [1, 1], operation, torch.float32, fmt == "tf32"
    found = conv2d_product(a, b, None, None, None, *how)
    want = conv2d_product(a.cpu(), b.cpu(), None, None, None, *how)
    assert found.is_contiguous(memory_format=torch.channels_last)
    # Where torch computes, results in a 16-bit carrier are rounded to it.
    assert torch.allclose(found.cpu(), want, rtol=2.0**-8, atol=1e-4 * float(want.abs().max()))
