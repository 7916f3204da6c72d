"""Rounding to a float grid on every path, compared with torch's conversions and bit by bit with the
contract.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from qsync_fx import _C
from qsync_fx.formats import FORMATS
from tests.support.computing.native_reference import ROUNDINGS, SEEDS, STREAMS, uniform, vectors

every_isa = pytest.mark.parametrize("isa", _C.available_isas())
FLOATS = [fmt for fmt in FORMATS.values() if fmt.kind == "float" and fmt.mantissa <= 23]
LARGEST = torch.finfo(torch.float32).max


def rounded(
    x: torch.Tensor,
    grid: tuple[int, int, float],
    rounding: _C.Rounding,
    seed: int = 0,
    stream: int = 0,
    threads: int = 1,
    first: int = 0,
    isa: str | None = None,
) -> torch.Tensor:
    y = torch.full((x.numel() + 2,), 77.0)
    _C.round_float(
        x.data_ptr(),
        y.data_ptr() + 4,
        x.numel(),
        *grid,
        rounding,
        seed,
        stream,
        threads,
        first,
        isa,
    )
    assert y[0] == y[-1] == 77.0
    return y[1:-1]


def bits(x: torch.Tensor) -> NDArray[np.int32]:
    return np.asarray(x.contiguous().view(torch.int32).numpy())


def reference(
    x: torch.Tensor, grid: tuple[int, int, float], rounding: str, r: NDArray[np.float32]
) -> torch.Tensor:
    mantissa, e_min, largest = grid
    values = x.double().numpy()
    finite = np.isfinite(values)
    values = np.where(finite, values, 0.0)
    exponent = np.maximum(np.frexp(np.where(values == 0, 2.0**-150, values))[1] - 1, e_min)
    u = np.ldexp(values, mantissa - exponent)
    below = np.floor(u)
    up = {
        "stochastic": r < u - below,
        "nearest": np.rint(u) > below,
        "floor": np.zeros(u.shape, bool),
    }[rounding]
    y = np.clip(np.ldexp(below + up, exponent - mantissa), -largest, largest)
    return torch.where(
        torch.from_numpy(finite), torch.from_numpy(np.copysign(np.abs(y), x.numpy())).float(), x
    )


@every_isa
@settings(max_examples=150)
@given(data=st.data(), seed=SEEDS, stream=STREAMS)
def test_equals_the_reference(isa: str, data: st.DataObject, seed: int, stream: int) -> None:
    n = data.draw(st.one_of(st.integers(0, 100), st.integers(0, 40_000)))
    x = data.draw(vectors(n))
    e_min = data.draw(st.integers(-126, 127))
    mantissa = data.draw(st.integers(0, 23))
    largest = data.draw(st.sampled_from([LARGEST, 1.0, 448.0, 2.0**-140, 3.0e-38]))
    rounding, first = (
        data.draw(st.sampled_from(ROUNDINGS)),
        data.draw(st.sampled_from([0, 2**32 - 50])),
    )
    grid = (mantissa, e_min, largest)
    result = rounded(x, grid, rounding, seed, stream, data.draw(st.integers(1, 3)), first, isa)
    np.testing.assert_array_equal(
        bits(result), bits(reference(x, grid, rounding, uniform(n, seed, stream, first)))
    )


@every_isa
@pytest.mark.parametrize("fmt", FLOATS, ids=str)
def test_nearest_equals_the_conversion_of_torch(isa: str, fmt) -> None:  # type: ignore[no-untyped-def]
    x = torch.cat(
        [
            torch.randint(-(2**31), 2**31, (50_000,)).int().view(torch.float32),
            torch.randn(50_000) * 2.0**-6,
        ]
    )
    x = x[x.isfinite() & (x.abs() <= fmt.max)]
    result = rounded(x, (fmt.mantissa, fmt.e_min, fmt.max), "nearest", isa=isa)
    if fmt.dtype != torch.float32:
        assert torch.equal(result, x.to(fmt.dtype).float())
    elif fmt.name == "fp32":
        np.testing.assert_array_equal(bits(result), bits(x))
    else:
        # A grid within float32: each result is on it and at most half a step from its value.
        step = 2.0**-fmt.mantissa
        assert (bits(result) & (2 ** (23 - fmt.mantissa) - 1) == 0).all()
        assert (
            (result - x).abs().double()
            <= x.abs().double() * step / 2 + 2.0 ** (fmt.e_min - fmt.mantissa - 1)
        ).all()


@every_isa
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_representable_values_are_unchanged(isa: str, rounding: _C.Rounding) -> None:
    for dtype, grid in (
        (torch.float8_e4m3fn, (3, -6, 448.0)),
        (torch.float8_e5m2, (2, -14, 57344.0)),
    ):
        x = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float()
        np.testing.assert_array_equal(bits(rounded(x, grid, rounding, isa=isa)), bits(x))
    inf_nan = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
    assert (
        bits(rounded(inf_nan, (3, -6, 448.0), rounding, isa=isa)).tolist()
        == bits(torch.tensor([torch.inf, -torch.inf, torch.nan, 448.0, -448.0])).tolist()
    )


@every_isa
def test_in_place_and_stochastic_is_unbiased(isa: str) -> None:
    x = torch.randn(1000) * 0.02  # includes denormals of E4M3
    total, repeats = torch.zeros(1000, dtype=torch.float64), 1000
    for stream in range(repeats):
        y = x.clone()
        _C.round_float(
            y.data_ptr(),
            y.data_ptr(),
            1000,
            3,
            -6,
            448.0,
            "stochastic",
            int(torch.randint(2**62, ()).item()),
            stream,
            isa=isa,
        )
        total += y
    below = rounded(x, (3, -6, 448.0), "floor", isa=isa).double()
    step = torch.maximum(x.abs().double().log2().floor(), torch.tensor(-6.0)).exp2() / 8
    p = (x.double() - below) / step
    variance = (repeats * p * (1 - p) * step**2).sum()
    assert abs((total - repeats * x.double()).sum() / variance.sqrt()) < 5
    assert abs((repeats * (below - x)).sum() / variance.sqrt()) > 100, (
        "the statistic detects a biased rounding"
    )


@pytest.mark.parametrize(
    "grid",
    [
        (24, -6, 448.0),
        (-1, -6, 448.0),
        (3, -127, 448.0),
        (3, 128, 1.0),
        (3, -6, 0.0),
        (3, -6, torch.nan),
    ],
)
def test_wrong_grids(grid: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="not within"):
        rounded(torch.ones(3), grid, "nearest")
