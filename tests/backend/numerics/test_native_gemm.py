"""Bit-exact contract of INT8 matrix products on the CPU, on every path and with any number of
threads.
"""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx import _C
from tests.support.native.native_products import (
    DTYPES,
    LAYOUTS,
    LENGTHS,
    SIZES,
    matrices_at_the_end_of_memory,
    matrix,
    moved,
    multiplied,
)

every_isa = pytest.mark.parametrize("isa", _C.available_isas())


def expected(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return the product from FP64 sums, which are exact below 2**53 in any order."""
    sums = a.double() @ b.double()
    if dtype == torch.int32:
        return sums.to(torch.int32)
    value = sums.float()
    for scale in (
        a_scale,
        None if b_scale is None else b_scale.view(1, -1) if b_scale.dim() else b_scale,
    ):
        value = (
            value
            if scale is None
            else value * (scale.view(-1, 1) if scale is a_scale and scale.dim() else scale)
        )
    return (value if bias is None else value + bias).to(dtype)


@every_isa
@settings(max_examples=60)
@given(SIZES, SIZES, LENGTHS, LAYOUTS, LAYOUTS, st.integers(1, 3), st.integers(0, 2**32))
def test_sums_are_exact(
    isa: str, m: int, n: int, k: int, first: str, second: str, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    a, b = matrix(m, k, first), matrix(k, n, second)
    assert torch.equal(multiplied(a, b, threads=threads, isa=isa), expected(a, b, torch.int32))


SCALES = st.sampled_from(["none", "one", "each"])


@every_isa
@settings(max_examples=40)
@given(
    SIZES,
    SIZES,
    LENGTHS,
    SCALES,
    SCALES,
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_epilogue_rounds_as_torch_does(
    isa: str, m: int, n: int, k: int, of_a: str, of_b: str, biased: bool, dtype: torch.dtype
) -> None:
    def scale(kind: str, size: int) -> Tensor | None:
        return None if kind == "none" else torch.rand(()) if kind == "one" else torch.rand(size)

    a, b = matrix(m, k, "rows"), matrix(k, n, "columns")
    arguments = dtype, scale(of_a, m), scale(of_b, n), torch.randn(n) * 1000 if biased else None
    assert torch.equal(multiplied(a, b, *arguments, isa=isa), expected(a, b, *arguments))


@every_isa
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(100, 150, 200), (700, 60, 130), (1, 1000, 300), (20, 50, 6000), (30, 1100, 5001)],
)
def test_result_does_not_depend_on_blocks_and_threads(isa: str, m: int, n: int, k: int) -> None:
    a, b = matrix(m, k, "columns"), matrix(k, n, "rows")
    exact = expected(a, b, torch.int32)
    for threads in (1, 2, 3, 64):
        assert torch.equal(multiplied(a, b, threads=threads, isa=isa), exact)


@every_isa
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_saturate(isa: str, sign: int) -> None:
    length = 131_071
    a = torch.full((3, length), -128, dtype=torch.int8)
    b = torch.full((length, 2), -128 if sign > 0 else 127, dtype=torch.int8)
    assert (multiplied(a, b, isa=isa) == -128 * length * (-128 if sign > 0 else 127)).all()
    with pytest.raises(ValueError, match="131072"):
        multiplied(
            torch.zeros(1, length + 1, dtype=torch.int8),
            torch.zeros(length + 1, 1, dtype=torch.int8),
            isa=isa,
        )


@every_isa
def test_the_end_of_memory_is_not_passed(isa: str) -> None:
    with matrices_at_the_end_of_memory(torch.int8) as matrices:
        for last in matrices:
            other = matrix(last.shape[1], 40, "rows")
            assert torch.equal(multiplied(last, other, isa=isa), expected(last, other, torch.int32))
            transposed = other.t(), last.t()
            assert torch.equal(multiplied(*transposed, isa=isa), expected(*transposed, torch.int32))


@every_isa
def test_nonfinite_values_propagate(isa: str) -> None:
    a, b = torch.ones(3, 2, dtype=torch.int8), torch.ones(2, 5, dtype=torch.int8)
    scale = torch.tensor([float("nan"), float("inf"), 1.0])
    for dtype in (torch.float32, torch.bfloat16):
        result = multiplied(a, b, dtype, scale, isa=isa)
        assert (
            result[0].isnan().all() and (result[1] == float("inf")).all() and (result[2] == 2).all()
        )
    huge = torch.tensor(torch.finfo(torch.float32).max / 2)
    assert (multiplied(a, b, torch.bfloat16, huge, isa=isa) == float("inf")).all(), (
        "the largest FP32 value rounds to infinity in BF16, as in torch"
    )


@every_isa
@pytest.mark.parametrize("places", [1, 3, 17])
def test_operands_may_be_unaligned(isa: str, places: int) -> None:
    m, n, k = 35, 37, 67
    for layout in ("rows", "columns"):
        a, b = moved(matrix(m, k, layout), places), moved(matrix(k, n, layout), 2 * places)
        for dtype in (torch.float32, torch.bfloat16):
            of_a, of_b, bias = (moved(torch.randn(size), places) for size in (m, n, n))
            memory = torch.full((m * n + 2 * places,), 77, dtype=dtype)
            result = memory[places : places + m * n]
            _C.gemm(
                *(
                    a.data_ptr(),
                    b.data_ptr(),
                    result.data_ptr(),
                    m,
                    n,
                    k,
                    a.stride(),
                    b.stride(),
                    DTYPES[dtype],
                ),
                a_scale=of_a.data_ptr(),
                a_scale_each=True,
                b_scale=of_b.data_ptr(),
                b_scale_each=True,
                bias=bias.data_ptr(),
                isa=isa,
            )
            assert torch.equal(result.view(m, n), expected(a, b, dtype, of_a, of_b, bias))
            assert (memory[:places] == 77).all() and (memory[places + m * n :] == 77).all()


@every_isa
def test_concurrent_calls_are_independent(isa: str) -> None:
    a, b = matrix(150, 300, "rows"), matrix(300, 90, "columns")
    exact, matches = expected(a, b, torch.int32), []

    def work() -> None:
        matches.extend(torch.equal(multiplied(a, b, threads=2, isa=isa), exact) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert matches == [True] * 120


def test_invalid_products_are_rejected() -> None:
    a, b = torch.zeros(2, 3, dtype=torch.int8), torch.zeros(3, 4, dtype=torch.int8)
    result = torch.zeros(2, 4)
    good = (a.data_ptr(), b.data_ptr(), result.data_ptr(), 2, 4, 3, a.stride(), b.stride())
    _C.gemm(*good, "float32")
    with pytest.raises(ValueError, match="float64"):
        _C.gemm(*good, "float64")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threads"):
        _C.gemm(*good, "float32", threads=0)
    with pytest.raises(ValueError, match="null"):
        _C.gemm(0, *good[1:], "float32")
    with pytest.raises(ValueError, match="int32"):
        _C.gemm(*good, "int32", bias=torch.zeros(4).data_ptr())
