"""Python overhead of a small operator on the CPU, which dominates compiled models of small layers.

The tests count calls of functions and methods, in Python and in C. The count is the same on every
machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.numerics import native, reference
from qsync_fx.backend.operators.gemm.gemm import gemm
from qsync_fx.backend.operators.quantize import quantize
from qsync_fx.errors import PrecisionError
from qsync_fx.formats import FORMATS

SEED = torch.zeros(1, dtype=torch.int64)
INT8 = FORMATS["int8"]


def calls(function: Callable[[], object]) -> int:
    """Return the number of calls in `function`, after its caches are filled."""
    for _ in range(3):
        function()
    count = 0

    def counted(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_quantizing_and_multiplying_make_few_calls() -> None:
    x, weight, bias = torch.randn(8, 64, dtype=torch.bfloat16), torch.randn(32, 64), torch.randn(32)
    q, scale = quantize(x, SEED, 0, "int8", "nearest", [])
    w, w_scale = quantize(weight, SEED, 1, "int8", "nearest", [])
    assert calls(lambda: quantize(x, SEED, 0, "int8", "nearest", [])) <= 32
    assert calls(lambda: gemm(q, w, scale, w_scale, bias, torch.bfloat16, transposed=True)) <= 42


SIZES: Sequence[tuple[int, ...]] = (
    (),
    (5,),
    (1, 7),
    (7, 1),
    (3, 4),
    (0, 4),
    (4, 0),
    (2, 3, 4),
    (2, 1, 4),
    (2, 3, 4, 4),
)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_quantized_tensors_have_the_reference_strides(
    size: tuple[int, ...], transposed: bool
) -> None:
    x = torch.randn(size)
    if transposed:
        x = x.permute(*reversed(range(x.dim()))) if x.dim() else x
    for source in (x, x.requires_grad_(), x.detach().double(), x.detach().half()):
        q, scale = native.quantize(source, SEED, 0, INT8, "nearest", ())
        expected, expected_scale = reference.quantize(source, SEED, 0, INT8, "nearest", ())
        assert q.stride() == expected.stride() and q.dtype == torch.int8
        assert torch.equal(q, expected)
        assert (scale.shape, scale.dtype) == ((), torch.float32) and torch.equal(
            scale, expected_scale
        )


def test_scales_are_fp32_for_any_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for keep in ([], [0]):
            x = torch.arange(6, dtype=torch.float32).reshape(2, 3)
            _, scale = quantize(x, SEED, 0, "int8", "nearest", keep)
            assert scale.dtype == torch.float32
            assert torch.equal(
                scale.amax(),
                torch.tensor(5.0, dtype=torch.float32) / torch.tensor(127.0, dtype=torch.float32),
            )
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(3, 5, 4), (1, 5, 1), (3, 0, 4), (0, 5, 4), (3, 5, 0)]
)
def test_products_of_either_orientation(
    rows: int, inner: int, columns: int, transposed: bool
) -> None:
    a = torch.randint(-127, 128, (rows, inner), dtype=torch.int8)
    b = torch.randint(
        -127, 128, (columns, inner) if transposed else (inner, columns), dtype=torch.int8
    )
    bias = torch.randn(columns, dtype=torch.float64)
    expected = a.double() @ (b.t() if transposed else b).double() * 0.5 + bias
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        result: Tensor = gemm(a, b, torch.tensor(0.5), None, bias, dtype, transposed=transposed)
        assert (result.dtype, result.shape) == (dtype, (rows, columns))
        assert result.is_contiguous() and result.stride() == (max(columns, 1), 1)
        torch.testing.assert_close(result, expected.to(dtype), rtol=0.02, atol=0.02)


def test_wrong_operands_are_reported_as_before() -> None:
    a, b = torch.zeros(3, 5, dtype=torch.int8), torch.zeros(4, 6, dtype=torch.int8)
    with pytest.raises(RuntimeError, match=r"\[3, 5\] and \[6, 4\] cannot be multiplied"):
        gemm(a, b, None, None, None, transposed=True)
    with pytest.raises(RuntimeError, match=r"\[3, 5\] and \[4, 6\] cannot be multiplied"):
        gemm(a, b, None, None, None)
    with pytest.raises(RuntimeError, match=r"bias is \[5\]"):
        gemm(a, torch.zeros(5, 5, dtype=torch.int8), None, None, torch.zeros(4))
    with pytest.raises(RuntimeError, match="operands are matrices"):
        gemm(a[0], b, None, None, None)
    with pytest.raises(RuntimeError, match=r"a_scale has the shape \[5, 1\], not \[3, 1\]"):
        gemm(a, torch.zeros(5, 5, dtype=torch.int8), torch.zeros(5, 1), None, None)
    with pytest.raises(RuntimeError, match="a_scale has 1 dimensions"):
        gemm(a, torch.zeros(5, 5, dtype=torch.int8), torch.zeros(3), None, None)
    with pytest.raises(PrecisionError, match=r"a_scale is torch\.float64"):
        gemm(
            a, torch.zeros(5, 5, dtype=torch.int8), torch.zeros((), dtype=torch.float64), None, None
        )
