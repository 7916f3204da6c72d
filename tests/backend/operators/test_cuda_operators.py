"""`qsync::gemm` and `qsync::conv2d_product`: results and rejected arguments.

The tests need no GPU: the CPU implementation in plain torch defines the results of the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda.problem import ConvProblem
from qsync_fx.backend.operators.gemm.gemm import conv2d_product, gemm
from qsync_fx.errors import PrecisionError
from tests.support.computing.lowered_layers import leaf
from tests.support.computing.products_in_fp64 import Product

TYPES = (
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)
SIZES = st.integers(1, 40)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=torch.int8)
    return torch.randn(shape).to(dtype)


def scale(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    return None if kind == "none" else torch.rand(shape if kind == "channel" else ()) + 0.1


KINDS = st.sampled_from(["none", "tensor", "channel"])
PAIRS = st.sampled_from([(t, t) for t in TYPES] + [(torch.float8_e5m2, torch.float8_e4m3fn)])


@settings(max_examples=80)
@given(
    SIZES,
    SIZES,
    SIZES,
    PAIRS,
    KINDS,
    KINDS,
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_gemm_equals_fp64(
    m: int,
    n: int,
    k: int,
    types: tuple[torch.dtype, torch.dtype],
    a_kind: str,
    b_kind: str,
    biased: bool,
    out: torch.dtype,
    transposed: bool,
) -> None:
    a, b = values((m, k), types[0]), values((n, k) if transposed else (k, n), types[1])
    b = b.t() if transposed else b
    a_scale, b_scale = scale(a_kind, (m, 1)), scale(b_kind, (1, n))
    bias = torch.randn(n) if biased else None
    result = gemm(a, b, a_scale, b_scale, bias, out_dtype=out)
    first, second = (
        t.double() * (1.0 if s is None else s.double()) for t, s in ((a, a_scale), (b, b_scale))
    )
    Product.of(torch.matmul, first, second, bias).assert_met(result, None)
    assert result.dtype == out and result.is_contiguous()


def test_int8_sums_are_exact_at_any_length() -> None:
    a = torch.full((2, 131_071), -128, dtype=torch.int8)
    assert gemm(a, a.t(), None, None, None).tolist() == [[131_071 * 2.0**14] * 2] * 2
    odd = torch.full((1, 3001), 127, dtype=torch.int8)
    assert (
        gemm(odd, odd.t(), None, None, None).item()
        == torch.tensor(3001 * 127.0**2, dtype=torch.float64).float().item()
    )


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_nonfinite_values_propagate(bad: float) -> None:
    a, b = torch.ones(2, 3, dtype=torch.float8_e4m3fn), torch.ones(3, 2, dtype=torch.float8_e4m3fn)
    y = gemm(a, b, torch.tensor([[bad], [1.0]]), None, None)
    assert not y[0].isfinite().any() and y[1].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"a": torch.zeros(2, 3, dtype=torch.int32)}, PrecisionError),
        ({"a": torch.zeros(2, 3)}, PrecisionError),  # FP32 and INT8
        ({"out_dtype": torch.float64}, PrecisionError),
        ({"a_scale": torch.ones(2, 1, dtype=torch.float16)}, PrecisionError),
        ({"a_scale": torch.ones(3, 1)}, RuntimeError),
        ({"b_scale": torch.ones(4)}, RuntimeError),
        ({"bias": torch.ones(1, 4)}, RuntimeError),
        ({"b": torch.zeros(2, 4, dtype=torch.int8)}, RuntimeError),
        ({"b": torch.zeros(3, dtype=torch.int8)}, RuntimeError),
    ],
)
def test_invalid_products_are_rejected(change: dict[str, Any], error: type[Exception]) -> None:
    good: dict[str, Any] = {
        "a": torch.zeros(2, 3, dtype=torch.int8),
        "b": torch.zeros(3, 4, dtype=torch.int8),
    }
    good |= {"a_scale": None, "b_scale": None, "bias": None}
    gemm(**good)
    with pytest.raises(error):
        gemm(**good | change)
    with pytest.raises(error), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        gemm(**good | change)


CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_gemm_passes_torchs_checks(dtype: torch.dtype) -> None:
    a, b = values((5, 16), dtype), values((7, 16), dtype).t()
    rest = torch.rand(5, 1), torch.rand(()), torch.rand(7), torch.bfloat16, False
    # The schema check compares arguments with operators that torch does not have for FP8.
    checks = [
        check
        for check in CHECKS
        if dtype.itemsize > 1 or dtype == torch.int8 or check != "test_schema"
    ]
    torch.library.opcheck(torch.ops.qsync.gemm.default, (a, b, *rest), test_utils=checks)


@pytest.mark.parametrize("operation", ["fprop", "dgrad", "wgrad"])
def test_conv_passes_torchs_checks(operation: str) -> None:
    x, weight, y = (2, 3, 9, 8), (4, 3, 3, 2), (2, 4, 5, 9)
    shapes = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[operation]
    a, b = (values(shape, torch.bfloat16) for shape in shapes)
    size = [9, 8] if operation == "dgrad" else [3, 2]
    rest = size, [2, 1], [1, 1], [1, 1], operation, torch.float32, False
    torch.library.opcheck(
        torch.ops.qsync.conv2d_product.default,
        (a, b, torch.rand(()), None, None, *rest),
        test_utils=CHECKS,
    )


PAIR = st.tuples(st.integers(1, 2), st.integers(1, 2))


@settings(max_examples=40)
@given(
    st.tuples(*[st.integers(1, 7)] * 7),
    PAIR,
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    PAIR,
    PAIRS,
    st.booleans(),
)
def test_convolutions_equal_fp64(
    sizes: tuple[int, ...],
    stride: Any,
    padding: Any,
    dilation: Any,
    types: tuple[torch.dtype, torch.dtype],
    last: bool,
) -> None:
    """The three products against autograd in FP64, with the same operands."""
    n, c, k, h, w, r, s = sizes
    problem = ConvProblem(
        "fprop", n, h, w, c, k, r, s, padding, stride, dilation, "fp32", "fp32", "fp32"
    )
    assume(problem.p > 0 and problem.q > 0)
    geometry = list(stride), list(padding), list(dilation)

    def operand(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = values(shape, dtype)
        return tensor.contiguous(memory_format=torch.channels_last) if last else tensor

    x, weight, g = (
        operand((n, c, h, w), types[1]),
        operand((k, c, r, s), types[1]),
        operand((n, k, problem.p, problem.q), types[0]),
    )
    a_scale, bias = torch.rand(()), torch.randn(k)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, weight, None, *geometry)

    def backward(g: Tensor, x: Tensor, weight: Tensor, index: int) -> Tensor:
        leaves = leaf(x), leaf(weight)
        return torch.autograd.grad(convolve(*leaves), leaves, g)[index]

    element = torch.empty(1, dtype=torch.float64)
    like_x, like_w = element.expand(x.shape).contiguous(), element.expand(weight.shape).contiguous()
    result = conv2d_product(x, weight, a_scale, None, bias, [r, s], *geometry, "fprop")
    Product.of(
        convolve, x.double() * a_scale.double(), weight.double(), bias.view(-1, 1, 1)
    ).assert_met(result, None)
    result = conv2d_product(g, weight, None, a_scale, None, [h, w], *geometry, "dgrad")
    Product.of(
        lambda g, w: backward(g, like_x, w, 0), g.double(), weight.double() * a_scale.double()
    ).assert_met(result, None)
    result = conv2d_product(g, x, None, None, None, [r, s], *geometry, "wgrad")
    Product.of(lambda g, x: backward(g, x, like_w, 1), g.double(), x.double()).assert_met(
        result, None
    )
