"""Products of BF16 matrices on the CPU: exact for integers, else close to FP64, and independent of
the number of threads.
"""

from __future__ import annotations

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

BF16 = torch.bfloat16
every_isa = pytest.mark.parametrize("isa", _C.available_isas())


def near(sums: Tensor, a: Tensor, b: Tensor) -> bool:
    """Return whether FP32 sums are within the error bound of the contract."""
    wide, other, k = a.double(), b.double(), a.shape[1]
    largest = max((float(t.abs().max()) for t in (wide, other) if t.numel()), default=0.0)
    bound = (k + 2) * 2**-24 * 1.001 * (wide.abs() @ other.abs()) + k * 2.0**-126 * (1 + largest)
    return bool(((sums.double() - wide @ other).abs() <= bound).all())


def like(layout: Tensor, low: int, high: int) -> Tensor:
    """Fill a matrix with zeros and random numbers of magnitudes from 2**low to 2**high."""
    numbers = torch.randn(layout.shape) * torch.exp2(
        torch.randint(low, high + 1, layout.shape).float()
    )
    layout.copy_(numbers.where(torch.rand(layout.shape) < 0.95, 0))
    return layout


@every_isa
@settings(max_examples=60)
@given(SIZES, SIZES, LENGTHS, LAYOUTS, LAYOUTS, st.integers(1, 3), st.integers(0, 2**32))
def test_integer_sums_are_exact(
    isa: str, m: int, n: int, k: int, first: str, second: str, threads: int, seed: int
) -> None:
    torch.manual_seed(seed)
    a, b = matrix(m, k, first, BF16), matrix(k, n, second, BF16)
    exact = (a.double() @ b.double()).float()
    for dtype in (torch.float32, BF16):
        assert torch.equal(multiplied(a, b, dtype, threads=threads, isa=isa), exact.to(dtype))


@every_isa
@settings(max_examples=60)
@given(
    SIZES,
    SIZES,
    LENGTHS,
    st.sampled_from(["rows", "columns", "rows within", "columns within", "every second"]),
    st.sampled_from([(0, 0), (-3, 3), (-20, 20), (-70, -50), (-133, -100)]),
    st.integers(0, 2**32),
)
def test_other_sums_are_near(
    isa: str, m: int, n: int, k: int, layout: str, magnitudes: tuple[int, int], seed: int
) -> None:
    """Includes denormal operands and sums."""
    torch.manual_seed(seed)
    a, b = (
        like(matrix(m, k, layout, BF16), *magnitudes),
        like(matrix(k, n, layout, BF16), *magnitudes),
    )
    result = multiplied(a, b, torch.float32, isa=isa)
    assert near(result, a, b)
    assert torch.equal(multiplied(a, b, BF16, isa=isa), result.to(BF16)), (
        "BF16 results are FP32 sums, rounded once"
    )


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_scales_and_bias_follow_in_fp32(isa: str, dtype: torch.dtype) -> None:
    a, b = matrix(35, 70, "rows", BF16), matrix(70, 37, "columns", BF16)
    sums = (a.double() @ b.double()).float()
    of_a, of_b, bias = torch.rand(35), torch.rand(()), torch.randn(37) * 1000
    expected = (sums * of_a.view(-1, 1) * of_b + bias).to(dtype)
    assert torch.equal(multiplied(a, b, dtype, of_a, of_b, bias, isa=isa), expected)
    assert torch.equal(multiplied(a, b, dtype, bias=bias, isa=isa), (sums + bias).to(dtype))


@every_isa
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(100, 150, 200), (700, 60, 130), (1, 1000, 300), (20, 50, 6000), (30, 1100, 5001)],
)
def test_threads_change_no_bit(isa: str, m: int, n: int, k: int) -> None:
    a, b = torch.randn(k, m).t().to(BF16), torch.randn(k, n).to(BF16)
    alone = multiplied(a, b, torch.float32, isa=isa)
    assert near(alone, a, b)
    for threads in (2, 3, 64):
        assert torch.equal(multiplied(a, b, torch.float32, threads=threads, isa=isa), alone)
    # Slices of rows and columns are computed in other blocks.
    assert torch.equal(multiplied(a[m // 2 :], b, torch.float32, isa=isa), alone[m // 2 :])
    assert torch.equal(multiplied(a, b[:, n // 3 :], torch.float32, isa=isa), alone[:, n // 3 :])


@every_isa
def test_nonfinite_values_propagate(isa: str) -> None:
    inf, nan = float("inf"), float("nan")
    for m, n, k in ((3, 5, 2), (40, 70, 33)):
        a, b = torch.ones(m, k, dtype=BF16), torch.ones(k, n, dtype=BF16)
        a[0, k - 1], a[1, 0], a[2, 1], b[0, 1] = nan, inf, -inf, 0
        for dtype in (torch.float32, BF16):
            result = multiplied(a, b, dtype, isa=isa)
            assert result[0].isnan().all()
            assert result[1, 1].isnan() and (result[1, 2:] == inf).all() and result[1, 0] == inf
            assert (result[2] == -inf).all() and result[3:].isfinite().all()
            assert torch.equal(multiplied(b.t(), a.t(), dtype, isa=isa).isnan(), result.isnan().t())
    huge = torch.full((2, 1), 3e38, dtype=BF16)
    assert (multiplied(huge, 2 * torch.ones(1, 3, dtype=BF16), torch.float32, isa=isa) == inf).all()


@every_isa
@pytest.mark.parametrize("places", [1, 3, 17])
def test_operands_may_be_unaligned(isa: str, places: int) -> None:
    m, n, k = 35, 37, 67
    for layout in ("rows", "columns"):
        a, b = (
            moved(matrix(m, k, layout, BF16), places),
            moved(matrix(k, n, layout, BF16), 2 * places),
        )
        for dtype in (torch.float32, BF16):
            bias = moved(torch.randn(n), places)
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
                bias=bias.data_ptr(),
                isa=isa,
                operands="bfloat16",
            )
            assert torch.equal(
                result.view(m, n), ((a.double() @ b.double()).float() + bias).to(dtype)
            )
            assert (memory[:places] == 77).all() and (memory[places + m * n :] == 77).all()


@every_isa
def test_the_end_of_memory_is_not_passed(isa: str) -> None:
    with matrices_at_the_end_of_memory(BF16) as matrices:
        for last in matrices:
            other = matrix(last.shape[1], 40, "rows", BF16)
            for a, b in ((last, other), (other.t(), last.t())):
                exact = (a.double() @ b.double()).float()
                assert torch.equal(multiplied(a, b, torch.float32, isa=isa), exact)


def test_inner_dimension_may_exceed_the_int8_limit() -> None:
    a = torch.ones(2, 131_072 + 5, dtype=BF16)
    assert (multiplied(a, a.t(), torch.float32) == 131_077).all()


def test_invalid_products_are_rejected() -> None:
    a, b, result = torch.zeros(2, 3, dtype=BF16), torch.zeros(3, 4, dtype=BF16), torch.zeros(2, 4)
    good = (a.data_ptr(), b.data_ptr(), result.data_ptr(), 2, 4, 3, a.stride(), b.stride())
    _C.gemm(*good, "float32", operands="bfloat16")
    with pytest.raises(ValueError, match="float16"):
        _C.gemm(*good, "float32", operands="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int32"):
        _C.gemm(*good, "int32", operands="bfloat16")


def test_each_path_has_its_instruction() -> None:
    instructions = {isa: _C.gemm_instructions(isa) for isa in _C.available_isas()}
    assert instructions["scalar"] == {"int8": "none", "bfloat16": "none"}
    expected = {
        "amx": ("tdpbssd", ["tdpbf16ps"]),
        "avx512_vnni": ("vpdpbusd", ["vdpbf16ps", "vfmadd231ps"]),
        "avx512": ("vpmaddwd", ["vfmadd231ps"]),
        "avx2": ("vpmaddwd", ["vfmadd231ps"]),
    }
    for isa in instructions.keys() & expected.keys():
        integers, floats = expected[isa]
        assert instructions[isa]["int8"] == integers and instructions[isa]["bfloat16"] in floats
