"""INT8 convolutions on the CPU: the three products of the native module are bit-equal to torch's
operators.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from qsync_fx import _C
from qsync_fx.backend.cuda.problem import ConvOperation, ConvProblem, reference_result
from qsync_fx.backend.cuda.problem.problem import ConvProduct
from qsync_fx.backend.operators.gemm import cpu_kernels, dispatch
from qsync_fx.backend.operators.gemm.gemm import conv2d_product
from tests.support import tiers
from tests.support.computing.lowered_layers import Geometry, Layer, leaf, recorded

PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))
SIDE = st.integers(1, 12)


def images(shape: tuple[int, ...], last: bool) -> Tensor:
    result = torch.randint(-128, 128, shape, dtype=torch.int8)
    return result.contiguous(memory_format=torch.channels_last) if last else result


@settings(max_examples=120)
@given(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 40),
        st.integers(1, 40),
        SIDE,
        SIDE,
        st.integers(1, 4),
        st.integers(1, 4),
    ),
    PAIR,
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    PAIR,
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_bits_equal_the_reference(
    sizes: tuple[int, ...], stride: Any, padding: Any, dilation: Any, last: bool, out: torch.dtype
) -> None:
    n, c, k, h, w, r, s = sizes
    problem = ConvProblem(
        "fprop", n, h, w, c, k, r, s, padding, stride, dilation, "fp32", "fp32", "fp32"
    )
    assume(problem.p > 0 and problem.q > 0)
    x, weight, y = (
        images((n, c, h, w), last),
        images((k, c, r, s), last),
        images((n, k, problem.p, problem.q), last),
    )
    geometry = list(stride), list(padding), list(dilation)
    scalars, each = (torch.rand(()), torch.rand(())), torch.rand(1, k, 1, 1)
    cases: list[tuple[ConvOperation, Tensor, Tensor, tuple[Tensor | None, ...], list[int]]] = [
        ("fprop", x, weight, (scalars[0], each, torch.randn(k) * 99), [r, s]),
        ("dgrad", y, weight, (*scalars, None), [h, w]),
        ("wgrad", y, x, (*scalars, None), [r, s]),
    ]
    for operation, a, b, scales, size in cases:
        product = ConvProduct(a, b, *scales, size, *geometry, operation, out)  # type: ignore[arg-type]
        assert cpu_kernels.multiplies_conv(product) == (operation != "dgrad" or stride == (1, 1))
        actual, expected = conv2d_product(*product), reference_result.conv2d_product(product)
        assert actual.dtype == out and torch.equal(actual, expected)
        assert actual.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("fmt", "geometry", "products"),
    [
        ("int8", Geometry([1, 1], [1, 1], [1, 1]), 1),
        ("int8_grad", Geometry([1, 1], [1, 1], [1, 1]), 3),
        ("int8_grad", Geometry([2, 2], [1, 1], [1, 1]), 2),
        ("int8_grad", Geometry([1, 1], [1, 1], [1, 1], groups=2), 0),
    ],
)
def test_layers_use_it_where_it_is_faster(
    fmt: str, geometry: Geometry, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaf(torch.randn(2, 64, 7, 6).to(memory_format=torch.channels_last))
    weight, bias = leaf(torch.randn(64, 64 // geometry.groups, 3, 3)), leaf(torch.randn(64))
    layer, results = Layer(fmt, geometry, out_dtype=torch.float32), []
    for unit in (True, False):
        monkeypatch.setattr(dispatch, "native_integer_products", lambda unit=unit: unit)
        with recorded() as calls:
            y = layer(x, weight, bias)
            gradients = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
        assert calls.count("qsync::conv2d_product") == (products if unit else 0)
        assert y.is_contiguous(memory_format=torch.channels_last)
        results.append((y, *gradients))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=2**-6, atol=2**-6 * float(expected.detach().abs().max())
        )


@tiers.ALL
def test_compiled_models_use_the_kernel_for_any_memory_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor computes convolutions channels-last; outputs and gradients have the strides of the
    model.
    """
    monkeypatch.setattr(dispatch, "native_integer_products", lambda: True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 96, 3)
    )
    x = torch.randn(2, 64, 9, 8)
    compiled = torch.compile(model, backend="qsync", options={"precision": "int8_grad"})
    compiled(leaf(x)).sum().backward()
    model.zero_grad()
    compiled_input = leaf(x)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        y = compiled(compiled_input)
        y.square().sum().backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts["qsync::conv2d_product"] == 6
    assert y.is_contiguous() and not y.is_contiguous(memory_format=torch.channels_last)
    results = [y, compiled_input.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    plain = leaf(x)
    z = model(plain)
    z.square().sum().backward()
    for actual, expected in zip(
        results, [z, plain.grad, *(p.grad for p in model.parameters())], strict=True
    ):
        assert actual is not None and expected is not None
        assert actual.stride() == expected.stride()
        # The gradient of a bias before a norm is only noise.
        if float(expected.detach().abs().max()) > 1e-2:
            assert float((actual - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("isa", _C.available_isas())
@pytest.mark.parametrize("places", [1, 19])
def test_images_may_be_unaligned(isa: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(*shape: int) -> Tensor:
        like = images(shape, True)
        return (
            torch.empty(like.numel() + places, dtype=torch.int8)[places:]
            .as_strided(shape, like.stride())
            .copy_(like)
        )

    native = _C.conv
    monkeypatch.setattr(_C, "conv", lambda *args, **named: native(*args, **named | {"isa": isa}))
    x, weight, y, geometry = (
        moved(3, 13, 7, 6),
        moved(9, 13, 3, 2),
        moved(3, 9, 7, 7),
        ([1, 1], [1, 1], [1, 1]),
    )
    cases: list[tuple[ConvOperation, Tensor, Tensor, list[int]]] = [
        ("fprop", x, weight, [3, 2]),
        ("dgrad", y, weight, [7, 6]),
        ("wgrad", y, x, [3, 2]),
    ]
    for operation, a, b, size in cases:
        for out in (torch.float32, torch.bfloat16):
            rest = (torch.rand(()), torch.rand(()), None, size, *geometry, operation, out)
            assert torch.equal(
                conv2d_product(a, b, *rest),
                reference_result.conv2d_product(ConvProduct(a, b, *rest)),
            )


@pytest.mark.parametrize("isa", _C.available_isas())
def test_result_does_not_depend_on_blocks_and_threads(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial sums: over 6,000 windows, and over 4,500 taps."""
    geometry = [1, 1], [1, 1], [1, 1]
    cases: list[tuple[ConvOperation, Tensor, Tensor]] = [
        ("wgrad", images((6, 20, 32, 32), True), images((6, 24, 32, 32), True)),
        ("fprop", images((1, 500, 7, 9), True), images((40, 500, 3, 3), True)),
    ]
    native = _C.conv
    for operation, a, b in cases:
        expected = reference_result.conv2d_product(
            ConvProduct(a, b, None, None, None, [3, 3], *geometry, operation)
        )
        for threads in (1, 3):

            def chosen(*arguments: Any, threads_to_use: int = threads, **named: Any) -> None:
                native(*arguments, **named | {"threads": threads_to_use, "isa": isa})

            monkeypatch.setattr(_C, "conv", chosen)
            actual = conv2d_product(a, b, None, None, None, [3, 3], *geometry, operation)
            assert torch.equal(actual, expected)
