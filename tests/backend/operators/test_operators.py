"""`qsync::linear` and `qsync::convolution`: forward and gradients against FP64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from qsync_fx.devices.cpu_features import cpu_multiplies_integers
from qsync_fx.formats import FORMATS
from tests.support.computing.layers_in_fp64 import assert_right
from tests.support.computing.lowered_layers import (
    OUT,
    Geometry,
    Layer,
    every_format,
    leaf,
    recorded,
)


@pytest.fixture(autouse=True)
def _fresh_numbers() -> None:
    print(f"torch.manual_seed({torch.seed()})")


@every_format
@settings(max_examples=60)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    inner=st.integers(0, 40),
    channels=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    biased=st.booleans(),
    channel=st.booleans(),
    rounding=st.sampled_from(["stochastic", "nearest", "floor"]),
    wide=st.booleans(),
    across=st.booleans(),
    inner_first=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_linear(
    fmt: str,
    leading: list[int],
    inner: int,
    channels: int,
    dtype: torch.dtype,
    biased: bool,
    channel: bool,
    rounding: str,
    wide: bool,
    across: bool,
    inner_first: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(inner, *leading).movedim(0, -1) if inner_first else torch.randn(*leading, inner)
    weight = torch.randn(inner, channels).t() if across else torch.randn(channels, inner)
    bias = leaf(torch.randn(channels)) if biased else None
    layer = Layer(fmt, None, channel, rounding, torch.float32 if wide else None)
    assert_right(layer, leaf(x.to(dtype)), leaf(weight), bias)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Geometry, Tensor, Tensor, int]:
    """Draw a geometry, input, weight, and the number of output channels."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    spatial, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    transposed = draw(st.booleans())

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=spatial, max_size=spatial))

    kernel, stride, padding, dilation, size = (
        each(1, 3),
        each(1, 3),
        each(0, 2),
        each(1, 2),
        each(1, 7),
    )
    # For output padding below the stride torch has a fast kernel. Otherwise it sums the weight
    # gradients of the samples in BF16.
    output_padding = [draw(st.integers(0, step - 1)) for step in stride]
    geometry = Geometry(
        stride, padding, dilation, transposed, output_padding if transposed else [0], groups
    )
    inputs, outputs = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    shape = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    batch = draw(st.sampled_from([(), (0,), (1,), (3,)]))
    x, weight = torch.randn(*batch, inputs, *size), torch.randn(*shape, *kernel)
    for n, k, s, p, d, more in zip(
        size, kernel, stride, padding, dilation, output_padding, strict=True
    ):
        assume(
            (n - 1) * s - 2 * p + d * (k - 1) + more + 1 > 0
            if transposed
            else n + 2 * p - d * (k - 1) > 0
        )
    if spatial == 2 and batch and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    return geometry, x, weight, outputs


@every_format
@settings(max_examples=40)
@given(
    convolution=convolutions(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    biased=st.booleans(),
    channel=st.booleans(),
    rounding=st.sampled_from(["stochastic", "nearest", "floor"]),
    wide=st.booleans(),
)
def test_convolution(
    fmt: str,
    convolution: tuple[Geometry, Tensor, Tensor, int],
    dtype: torch.dtype,
    biased: bool,
    channel: bool,
    rounding: str,
    wide: bool,
) -> None:
    geometry, x, weight, outputs = convolution
    bias = leaf(torch.randn(outputs)) if biased else None
    layer = Layer(fmt, geometry, channel, rounding, torch.float32 if wide else None)
    assert_right(layer, leaf(x.to(dtype)), leaf(weight), bias)


@every_format
@settings(max_examples=40)
@given(convolution=convolutions(), across=st.booleans())
def test_layout_of_a_convolution_is_that_of_torch(
    fmt: str, convolution: tuple[Geometry, Tensor, Tensor, int], across: bool
) -> None:
    geometry, x, weight, _ = convolution
    if across and weight.dim() < 5:
        weight = weight.movedim(1, -1).contiguous().movedim(-1, 1)
    batch = x if x.dim() == weight.dim() else x[None]
    expected = torch.ops.aten.convolution(batch, weight, None, *geometry.arguments)
    result = Layer(fmt, geometry)(x, weight)
    expected = expected if x.dim() == weight.dim() else expected[0]
    assume(result.numel())
    strides = [t.stride(d) for t in (result, expected) for d in range(t.dim()) if t.shape[d] > 1]
    assert strides[: len(strides) // 2] == strides[len(strides) // 2 :]


@every_format
def test_one_tap_kernel_ignores_dilation(fmt: str) -> None:
    """In BF16, torch 2.13 crashes with this dilation (segmentation fault)."""
    x = torch.randn(3, 1, 3, 1).as_strided((3, 1, 3, 1), (3, 1, 1, 1))
    weight = torch.randn(2, 1, 3, 1)
    actual, expected = (
        Layer(fmt, Geometry([3, 2], [1, 1], [1, step]))(x, weight) for step in (2, 1)
    )
    assert torch.equal(actual, expected)


@every_format
@pytest.mark.parametrize("shape", [(65, 96, 33), (64, 768, 128)])
@pytest.mark.parametrize("channel", [False, True])
def test_linear_of_a_common_size(fmt: str, shape: tuple[int, int, int], channel: bool) -> None:
    rows, inner, channels = shape
    x, weight, bias = (
        leaf(torch.randn(rows, inner)),
        leaf(torch.randn(channels, inner)),
        leaf(torch.randn(channels)),
    )
    assert_right(Layer(fmt, channel=channel), x, weight, bias)


@every_format
@pytest.mark.parametrize("groups", [1, 16])
def test_convolution_of_a_common_size(fmt: str, groups: int) -> None:
    x = leaf(torch.randn(2, 16, 15, 13).to(memory_format=torch.channels_last))
    geometry = Geometry([2, 2], [1, 1], [1, 1], groups=groups)
    assert_right(
        Layer(fmt, geometry), x, leaf(torch.randn(32, 16 // groups, 3, 3)), leaf(torch.randn(32))
    )


@pytest.mark.parametrize(
    ("inner", "unit"), [(133_143, True), (133_144, True), (133_145, False), (200_000, False)]
)
def test_sums_beyond_int32_use_the_emulation_dtype(inner: int, unit: bool) -> None:
    x, weight = torch.ones(1, inner), torch.ones(2, inner)
    assert (inner * 127**2 < 2**31) == unit
    unit = unit and cpu_multiplies_integers()
    with recorded() as calls:
        y = Layer("int8", out_dtype=torch.float32)(x, weight)
    assert ("qsync::integer_products" in calls) == unit
    # Integer sums are exact; FP32 loses up to half a unit in the last place per summand.
    torch.testing.assert_close(
        y, torch.full((1, 2), float(inner)), rtol=2**-22 if unit else inner * 2**-24, atol=0.0
    )


@every_format
def test_zeros_give_the_bias(fmt: str) -> None:
    x, weight, bias = torch.zeros(3, 4, 5), torch.randn(2, 5), torch.randn(2).to(OUT[fmt])
    assert torch.equal(Layer(fmt)(x, weight, bias), bias.expand(3, 4, 2))
    assert torch.equal(Layer(fmt)(torch.randn(7, 5), torch.zeros(2, 5), bias), bias.expand(7, 2))
    geometry = Geometry([1], [0], [1])
    assert torch.equal(
        Layer(fmt, geometry)(x, torch.randn(2, 4, 3), bias), bias[:, None].expand(3, 2, 3)
    )


@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_values_are_visible(fmt: str, bad: float) -> None:
    x, weight = leaf(torch.randn(4, 6)), leaf(torch.randn(3, 6))
    corrupted = x.detach().clone()
    corrupted[2, 1] = bad
    for layer in (Layer(fmt), Layer(fmt, channel=True)):
        y = layer(corrupted, weight)
        assert not y[2].isfinite().any()
        # Only the row itself is corrupted if each row has a scale, or the format has none.
        alone = layer.channel or not FORMATS[fmt].scaled
        assert y[[0, 1, 3]].isfinite().all() == alone
        good = layer(x, weight)
        gradient = torch.ones_like(good)
        gradient[1, 0] = bad
        for result in torch.autograd.grad(good, (x, weight), gradient):
            assert not result.isfinite().all()
    image, kernel = torch.randn(2, 3, 5), leaf(torch.randn(4, 3, 3))
    image[0, 0, 0] = bad
    y = Layer(fmt, Geometry([1], [0], [1]))(image, kernel)
    assert not y[0, :, 0].isfinite().any()


@pytest.mark.parametrize(
    ("rows", "inner", "channels", "unit"),
    [(32, 16, 8, True), (16, 16, 8, False), (32, 12, 8, False)],
)
def test_cublas_gets_no_integer_product_that_it_refuses(
    rows: int, inner: int, channels: int, unit: bool
) -> None:
    with torch._subclasses.FakeTensorMode(), torch.device("cuda"):
        xq, wq = (
            torch.empty(rows, inner, dtype=torch.int8),
            torch.empty(channels, inner, dtype=torch.int8),
        )
        x, weight, scale = torch.empty(rows, inner), torch.empty(channels, inner), torch.empty(())
        seed = torch.empty(1, dtype=torch.int64)
        with recorded() as calls:
            torch.ops.qsync.linear.default(
                x, weight, None, xq, scale, wq, scale, seed, 0, "int8", "nearest", torch.bfloat16
            )
    assert ("aten::_int_mm" in calls) == unit
    assert ("aten::mm" in calls) != unit


@pytest.mark.skipif(not cpu_multiplies_integers(), reason="this CPU's unit saturates")
@pytest.mark.parametrize(("out_dtype", "unit"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_convolution_with_a_wide_output_is_summed_in_integers(
    out_dtype: torch.dtype, unit: bool
) -> None:
    layer = Layer("int8", Geometry([2, 1], [1, 0], [1, 2]), out_dtype=out_dtype)
    with recorded() as calls:
        layer(torch.randn(3, 8, 9, 7), torch.randn(5, 8, 3, 2))
    in_floats = {"aten::convolution", "qsync::convolution_in_fp32"}.intersection(calls)
    assert ("qsync::integer_convolution" in calls) == unit and bool(in_floats) != unit
