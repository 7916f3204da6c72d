"""INT8 products on the CPU: the kernel is bit-equal to torch's operators, and layers use it if the
CPU has a native unit.
"""

from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda.problem import reference_result
from qsync_fx.backend.cuda.problem.problem import GemmProduct
from qsync_fx.backend.operators.gemm import cpu_kernels, dispatch
from qsync_fx.backend.operators.gemm.gemm import gemm
from tests.support.computing.lowered_layers import Geometry, Layer, leaf, recorded

SIZES = st.integers(0, 40)
KINDS = st.sampled_from(["none", "one", "each"])


def scale(kind: str, shape: tuple[int, int]) -> Tensor | None:
    return None if kind == "none" else torch.rand(shape if kind == "each" else ())


@settings(max_examples=60)
@given(
    st.tuples(SIZES, SIZES, SIZES),
    KINDS,
    KINDS,
    st.sampled_from([None, torch.float32, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
)
def test_bits_equal_the_reference(
    sizes: tuple[int, int, int],
    of_a: str,
    of_b: str,
    biased: torch.dtype | None,
    out: torch.dtype,
    by_columns: bool,
    transposed: bool,
) -> None:
    m, n, k = sizes
    a = torch.randint(-128, 128, (k, m) if by_columns else (m, k), dtype=torch.int8)
    a = a.t() if by_columns else a
    b = torch.randint(-128, 128, (n, k) if transposed else (k, n), dtype=torch.int8)
    scales = scale(of_a, (m, 1)), scale(of_b, (1, n))
    bias = None if biased is None else (torch.randn(n) * 100).to(biased)
    actual = gemm(a, b, *scales, bias, out, transposed=transposed)
    right = b.t() if transposed else b
    assert cpu_kernels.multiplies(a, right)
    expected = reference_result.gemm(GemmProduct(a, right, *scales, bias, out))
    assert actual.dtype == out and actual.is_contiguous() and torch.equal(actual, expected)


def test_sums_beyond_int32_are_the_references() -> None:
    a = torch.full((1, 131_072), -128, dtype=torch.int8)
    assert (
        not cpu_kernels.multiplies(a, a.t()) and gemm(a, a.t(), None, None, None).item() == 2.0**31
    )


def test_transposed_matrix_passes_opcheck() -> None:
    a, b = torch.ones(5, 16, dtype=torch.int8), torch.ones(7, 16, dtype=torch.int8)
    arguments = a, b, torch.rand(5, 1), torch.rand(()), torch.rand(7), torch.bfloat16, False, True
    torch.library.opcheck(torch.ops.qsync.gemm.default, arguments)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("fmt", ["int8", "int8_grad"])
def test_no_rows_are_no_error_and_have_no_gradient(
    fmt: str, unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "native_integer_products", lambda: unit)
    images = leaf(torch.randn(0, 64, 5, 5).to(memory_format=torch.channels_last))
    layers = (
        (Layer(fmt), leaf(torch.randn(0, 24)), leaf(torch.randn(8, 24))),
        (Layer(fmt, Geometry([1, 1], [1, 1], [1, 1])), images, leaf(torch.randn(64, 64, 3, 3))),
    )
    for layer, x, weight in layers:
        y = layer(x, weight)
        gradients = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
        assert y.shape[:2] == (0, weight.shape[0]) and gradients[0].shape == x.shape
        assert torch.equal(gradients[1], torch.zeros_like(weight))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a unit of x86")
@pytest.mark.parametrize("unit", [True, False])
def test_layers_use_the_kernel_with_a_native_unit(
    unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "native_integer_products", lambda: unit)
    x, weight = leaf(torch.randn(3, 4, 24)), leaf(torch.randn(8, 24))
    for fmt, products in (("int8", 1), ("int8_grad", 3)):
        with recorded() as calls:
            y = Layer(fmt)(x, weight)
            torch.autograd.grad(y, (x, weight), torch.randn_like(y))
        assert calls.count("qsync::gemm") == (products if unit else 0)
