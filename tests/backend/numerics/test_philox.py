"""Random numbers of CUDA kernels: Philox test vectors, unbiased rounding, independent streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from qsync_fx.backend.numerics import philox, reference
from qsync_fx.formats import precision

N = 1 << 18
SEEDS = st.integers(-(2**63), 2**63 - 1)
STREAMS = st.integers(0, 2**32 - 1)


# Random123's kat_vectors, philox4x32 with 10 rounds: counter and key, then the block.
@pytest.mark.parametrize(
    ("given_", "block"),
    [
        (
            "00000000 00000000 00000000 00000000 00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(given_: str, block: str) -> None:
    words = (torch.tensor(int(word, 16)) for word in given_.split())
    assert " ".join(f"{int(word):08x}" for word in philox.philox4x32(*words)) == block


@given(seed=SEEDS, stream=STREAMS, n=st.integers(1, 40), transposed=st.booleans())
def test_numbers_belong_to_places_in_memory(
    seed: int, stream: int, n: int, transposed: bool
) -> None:
    like = torch.empty(n, 3).t() if transposed else torch.empty(3, n)
    numbers = philox.uniform(like, torch.tensor([seed]), stream)
    assert numbers.stride() == like.stride()
    flat = philox.uniform(torch.empty(3 * n), torch.tensor(seed), stream)
    assert torch.equal(numbers.t().reshape(-1) if transposed else numbers.reshape(-1), flat)
    # The definition, one element at a time.
    low = 0xFFFFFFFF
    for place in {0, n, 3 * n - 1}:
        words = (place // 8, 0, stream, 0, seed & low, seed >> 32 & low)
        block = philox.philox4x32(*map(torch.tensor, words))
        bits = int(block[place % 8 // 2]) >> 16 * (place % 2) & 0xFFFF
        assert float(flat[place]) == (bits + 0.5) / 65536


def test_no_elements() -> None:
    assert philox.uniform(torch.empty(0, 3), torch.tensor([1]), 0).shape == (0, 3)


def deviation(numbers: torch.Tensor) -> float:
    """Return the deviation of the mean of uniform numbers from 0.5, in standard errors."""
    return float((numbers.double() - 0.5).mean() * (12 * numbers.numel()) ** 0.5)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the correlation of two samples of uniform numbers, in standard errors."""
    return float(((a.double() - 0.5) * (b.double() - 0.5)).mean() * 12 * a.numel() ** 0.5)


@settings(max_examples=6)
@given(seed=SEEDS, stream=STREAMS)
def test_uniform_and_independent(seed: int, stream: int) -> None:
    key = torch.tensor(seed)
    like = torch.empty(N)
    numbers = philox.uniform(like, key, stream)
    assert numbers.min() > 0
    assert numbers.max() < 1
    bits = (numbers.double() * 65536 - 0.5).long()
    for shift in (0, 8):
        counts = torch.bincount(bits >> shift & 255, minlength=256).double()
        chi_square = float(((counts - N / 256) ** 2 / (N / 256)).sum())
        assert abs(chi_square - 255) < 6.5 * (2 * 255) ** 0.5
    assert abs(deviation(numbers)) < 6
    # Within a block, between blocks, and between rows of usual lengths.
    for lag in (1, 2, 3, 7, 8, 16, 64, 768, 4096):
        assert abs(correlation(numbers[lag:], numbers[:-lag])) < 6
    for other in (seed ^ 1, seed ^ (1 << 32), seed ^ (1 << 62)):
        assert abs(correlation(numbers, philox.uniform(like, torch.tensor(other), stream))) < 6
    for following in (1, 2, 1 << 16, 1 << 31):
        assert (
            abs(correlation(numbers, philox.uniform(like, key, (stream + following) % 2**32))) < 6
        )


def test_correlation_measure_detects_correlation() -> None:
    numbers = philox.uniform(torch.empty(N), torch.tensor(5), 0)
    half = torch.rand(N) < 0.1
    assert correlation(numbers, torch.where(half, numbers, torch.rand(N))) > 6


@pytest.mark.parametrize("fmt", ["int8", "fp8", "fp8_e5m2"])
@settings(max_examples=5)
@given(seed=SEEDS)
def test_roundings_are_unbiased(fmt: str, seed: int) -> None:
    """The total error of many roundings of one tensor is within six standard errors plus the
    resolution of 16 random bits.
    """
    row, repeats = precision(fmt), 200
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    x = torch.randn(2048, generator=generator)
    units = x / reference.scales(x, row, [])
    below = reference.to_grid(units, row, "floor", None).double()
    above = -reference.to_grid(-units, row, "floor", None).double()
    part = torch.where(above > below, (units.double() - below) / (above - below), 0.0)
    ups = torch.zeros(2048, dtype=torch.float64)
    for stream in range(repeats):
        rounded = reference.to_grid(
            units, row, "stochastic", philox.uniform(units, torch.tensor(seed), stream)
        ).double()
        assert ((rounded == below) | (rounded == above)).all()
        ups += (rounded > below).double()
    between = above > below
    error = (ups - repeats * part)[between]
    variance = (repeats * part * (1 - part))[between]
    resolution = repeats * between.sum() * 2.0**-17
    assert abs(float(error.sum())) < 6 * float(variance.sum()) ** 0.5 + float(resolution)
    # The errors of the elements, not only their sum.
    squares = (error**2 / variance)[variance > 1]
    assert float((squares.sum() - squares.numel()) / (2 * squares.numel()) ** 0.5) < 8


@pytest.mark.parametrize("fmt", ["int8", "fp8", "fp8_e5m2"])
@given(seed=SEEDS, stream=STREAMS)
@settings(max_examples=20)
def test_exact_values_never_move(fmt: str, seed: int, stream: int) -> None:
    row = precision(fmt)
    every = torch.arange(256, dtype=torch.uint8).view(row.dtype).float()
    every = every[every.abs() <= row.max].repeat(20)
    random = philox.uniform(every, torch.tensor(seed), stream)
    assert torch.equal(reference.to_grid(every, row, "stochastic", random), every)


def test_reference_uses_philox_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    like, seed = torch.empty(100), torch.tensor([3])
    hashed = reference.uniform(like, seed, 7)
    assert not torch.equal(hashed, philox.uniform(like, seed, 7))
    called: list[torch.device] = []
    monkeypatch.setattr(philox, "uniform", lambda like, seed, stream: called.append(like.device))
    with torch._subclasses.FakeTensorMode():
        reference.uniform(
            torch.empty(4, device="cuda"), torch.empty(1, dtype=torch.int64, device="cuda"), 7
        )
    assert [device.type for device in called] == ["cuda"]
