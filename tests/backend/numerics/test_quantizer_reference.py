"""Bit-exact contract of quantization and rounding, for every format, layout and rounding mode.

The torch reference is compared with a search for the neighbours in the list of all values of a
format, and the native kernels are compared with the reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.numerics import native, reference
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.rounding import ROUNDINGS, Rounding
from tests.support.computing.native_reference import uniform, vectors
from tests.support.computing.quantized_values import GRIDDED, SCALED, assert_same, grid_of

INT4 = dataclasses.replace(FORMATS["int8"], name="int4", bits=4, max=7.0)
SEEDS = st.integers(-(2**63), 2**63 - 1)
SEED = torch.tensor([-7262512093])


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype], finite: bool = False) -> Tensor:
    """Draw tensors of 0 to 4 dimensions and any strides with zeros, denormals, huge values and,
    unless `finite`, NaN and Inf.
    """
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    x = draw(vectors(int(np.prod(shape)), dtype, finite)).view(shape)
    x = x.permute(draw(st.permutations(range(x.dim()))))
    for dim in range(x.dim()):
        layout = draw(
            st.sampled_from(["whole", "whole", "whole", "part", "every second", "one for all"])
        )
        if layout == "part" and x.shape[dim]:
            x = x.narrow(dim, 1, x.shape[dim] - 1)
        elif layout == "every second":
            x = x[(slice(None),) * dim + (slice(None, None, 2),)]
        elif layout == "one for all" and x.shape[dim]:
            x = x.narrow(dim, 0, 1).expand(*x.shape[:dim], 3, *x.shape[dim + 1 :])
    return x


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# The reference against the list of values.


def neighbours(u: np.ndarray, row: Precision) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest values of the format `<= u` and `>= u`, for `u` within its range."""
    grid = grid_of(row)
    return grid[np.searchsorted(grid, u, side="right") - 1], grid[
        np.searchsorted(grid, u, side="left")
    ]


@pytest.mark.parametrize("row", [*(FORMATS[fmt] for fmt in SCALED), INT4], ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_reference_rounds_to_a_neighbour(row: Precision, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300))
    x = data.draw(vectors(n, finite=True))
    seed, stream = data.draw(SEEDS), data.draw(st.integers(0, 2**32 - 1))
    scale = reference.scales(x, row, ())
    expected_scale = np.float32(x.abs().max()) / np.float32(row.max)
    assert scale.item() == (1 if not x.any() else max(expected_scale, np.float32(2.0**-126)))
    u = np.clip((x.numpy() / np.float32(scale)).astype(np.float64), -row.max, row.max)
    below, above = neighbours(u, row)
    fraction = np.where(above > below, (u - below) / np.where(above > below, above - below, 1), 0)
    r = uniform(n, seed % 2**64, stream)
    for rounding in ROUNDINGS:
        q = reference.quantize(x, torch.tensor(seed), stream, row, rounding, ())[0].double().numpy()
        assert (((q == below) | (q == above)) & (np.abs(q) <= row.max)).all()
        if rounding == "floor":
            assert (q == below).all()
        elif rounding == "nearest":
            # Ties go to the even neighbour, whose last mantissa bit is 0.
            assert (np.abs(q - u) <= np.minimum(u - below, above - u)).all()
            if row.kind == "integer":
                assert (q == np.rint(u)).all()
        else:
            # FP32 rounds the fraction of small negative values, so both neighbours are valid for r
            # within 2**-24 of it.
            certain = np.abs(r - fraction) > 2.0**-24
            assert (np.where(r < fraction, above, below) == q)[certain].all()


@pytest.mark.parametrize("fmt", SCALED)
def test_ties_go_to_the_even_neighbour(fmt: str) -> None:
    row = FORMATS[fmt]
    grid = grid_of(row)
    middles = torch.tensor((grid[:-1] + grid[1:]) / 2, dtype=torch.float32)
    q = reference.to_grid(middles, row, "nearest", None).double().numpy()
    place = np.searchsorted(grid, q)
    even = (
        grid % 2 == 0
        if row.kind == "integer"
        else (np.abs(np.arange(len(grid)) - len(grid) // 2) % 2 == 0)
    )
    assert even[place].all()


def test_random_numbers_equal_the_kernels_in_any_layout() -> None:
    x = torch.empty(3, 5, 4, 2).to(memory_format=torch.channels_last)
    numbers = reference.uniform(x, SEED, 9)
    assert numbers.stride() == x.stride()
    expected = torch.from_numpy(uniform(x.numel(), SEED.item() % 2**64, 9))
    assert torch.equal(numbers.permute(0, 2, 3, 1).reshape(-1), expected)
    assert torch.equal(reference.uniform(x, SEED[0], 9), numbers)
    assert not torch.equal(reference.uniform(x, SEED, 10), numbers)
    assert not torch.equal(reference.uniform(x, SEED + 1, 9), numbers)
    assert not torch.equal(reference.uniform(x, SEED + 2**32, 9), numbers)


# The kernels against the reference.


@pytest.mark.parametrize("row", [*(FORMATS[fmt] for fmt in SCALED), INT4], ids=str)
@settings(max_examples=150)
@given(x=tensors(FLOATS), data=st.data())
def test_native_quantization_has_the_bits_of_the_reference(
    row: Precision, x: Tensor, data: st.DataObject
) -> None:
    keep = data.draw(st.lists(st.integers(-x.dim(), x.dim() - 1), max_size=3)) if x.dim() else []
    seed, stream = torch.tensor([data.draw(SEEDS)]), data.draw(st.integers(0, 2**32 - 1))
    rounding = data.draw(st.sampled_from(ROUNDINGS))
    results = native.quantize(x, seed, stream, row, rounding, keep)
    expected = reference.quantize(x, seed, stream, row, rounding, keep)
    for actual, wanted in zip(results, expected, strict=True):
        assert_same(actual, wanted)


@pytest.mark.parametrize("fmt", GRIDDED)
@settings(max_examples=100)
@given(
    x=tensors(FLOATS),
    seed=SEEDS,
    stream=st.integers(0, 2**32 - 1),
    rounding=st.sampled_from(ROUNDINGS),
)
def test_native_rounding_has_the_bits_of_the_reference(
    fmt: str, x: Tensor, seed: int, stream: int, rounding: Rounding
) -> None:
    arguments = x, torch.tensor(seed), stream, FORMATS[fmt], rounding
    assert_same(native.round_to(*arguments), reference.round_to(*arguments))
