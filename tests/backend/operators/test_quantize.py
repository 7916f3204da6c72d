"""`qsync::quantize` and `qsync::round`: the contract to the last bit, for every format, layout and way to round.

What is expected comes from three sides: the plain torch reference is held against a search for the neighbours in the list of all values of
a format, the native kernels against the reference, and the operators against what torch demands of operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from native_reference import uniform, vectors
from torch import Tensor

from qsync_fx.backend.numerics import native, reference
from qsync_fx.backend.operators.casts.quantize import quantize
from qsync_fx.backend.operators.casts.round import round_to
from qsync_fx.errors import OptionError, PrecisionError
from qsync_fx.precision import FORMATS, Precision
from qsync_fx.rounding.mode import ROUNDINGS, Rounding

SCALED = [row.name for row in FORMATS.values() if row.scaled]
GRIDDED = [row.name for row in FORMATS.values() if not row.scaled and not row.plain]
INT4 = dataclasses.replace(FORMATS["int8"], name="int4", bits=4, max=7.0)

every_scaled = pytest.mark.parametrize("fmt", SCALED)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
SEEDS = st.integers(-(2**63), 2**63 - 1)
SEED = torch.tensor([-7262512093])


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal bits, types, shapes and strides; any NaN equals any other."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    if found.dtype.itemsize > 1:
        assert torch.equal(found.isnan(), expected.isnan())
        found, expected = found.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0)
    one, other = (
        t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in (found, expected)
    )
    assert torch.equal(one, other)


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype], finite: bool = False) -> Tensor:
    """Draws tensors of 0 to 4 dimensions with zeros, denormals, huge values and, unless `finite`, NaN and Inf, laid out in any way."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    x = draw(vectors(int(np.prod(shape)), dtype, finite)).view(shape)
    x = x.permute(draw(st.permutations(range(x.dim()))))
    for dim in range(x.dim()):
        how = draw(st.sampled_from(["whole", "whole", "whole", "part", "every second", "one for all"]))
        if how == "part" and x.shape[dim]:
            x = x.narrow(dim, 1, x.shape[dim] - 1)
        elif how == "every second":
            x = x[(slice(None),) * dim + (slice(None, None, 2),)]
        elif how == "one for all" and x.shape[dim]:
            x = x.narrow(dim, 0, 1).expand(*x.shape[:dim], 3, *x.shape[dim + 1 :])
    return x


FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# The reference means what it says.


def grid_of(row: Precision) -> np.ndarray:
    """Returns all values of a format that has few of them, ascending."""
    if row.kind == "integer":
        return np.arange(-row.max, row.max + 1)
    values = torch.arange(256, dtype=torch.uint8).view(row.dtype).double()
    return np.unique(values[values.isfinite()].numpy())


def neighbours(u: np.ndarray, row: Precision) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of the format below (or at) and above (or at) each of `u`, which lies within its range."""
    grid = grid_of(row)
    return grid[np.searchsorted(grid, u, side="right") - 1], grid[np.searchsorted(grid, u, side="left")]


@pytest.mark.parametrize("row", [*(FORMATS[fmt] for fmt in SCALED), INT4], ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_the_reference_takes_a_neighbour(row: Precision, data: st.DataObject) -> None:
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
            # Where both are as near the even one is taken, whose last mantissa bit is 0.
            assert (np.abs(q - u) <= np.minimum(u - below, above - u)).all()
            if row.kind == "integer":
                assert (q == np.rint(u)).all()
        else:
            # FP32 rounds the fraction of small negative values, so r within 2**-24 of it may go either way.
            certain = np.abs(r - fraction) > 2.0**-24
            assert (np.where(r < fraction, above, below) == q)[certain].all()


@every_scaled
def test_ties_go_to_the_even_neighbour(fmt: str) -> None:
    row = FORMATS[fmt]
    grid = grid_of(row)
    middles = torch.tensor((grid[:-1] + grid[1:]) / 2, dtype=torch.float32)
    q = reference.to_grid(middles, row, "nearest", None).double().numpy()
    place = np.searchsorted(grid, q)
    even = grid % 2 == 0 if row.kind == "integer" else (np.abs(np.arange(len(grid)) - len(grid) // 2) % 2 == 0)
    assert even[place].all()


def test_random_numbers_are_those_of_the_kernels_in_any_layout() -> None:
    x = torch.empty(3, 5, 4, 2).to(memory_format=torch.channels_last)
    found = reference.uniform(x, SEED, 9)
    assert found.stride() == x.stride()
    expected = torch.from_numpy(uniform(x.numel(), SEED.item() % 2**64, 9))
    assert torch.equal(found.permute(0, 2, 3, 1).reshape(-1), expected)
    assert torch.equal(reference.uniform(x, SEED[0], 9), found)
    assert not torch.equal(reference.uniform(x, SEED, 10), found)
    assert not torch.equal(reference.uniform(x, SEED + 1, 9), found)
    assert not torch.equal(reference.uniform(x, SEED + 2**32, 9), found)


# The kernels do what the reference does.


@pytest.mark.parametrize("row", [*(FORMATS[fmt] for fmt in SCALED), INT4], ids=str)
@settings(max_examples=150)
@given(x=tensors(FLOATS), data=st.data())
def test_native_quantization_has_the_bits_of_the_reference(row: Precision, x: Tensor, data: st.DataObject) -> None:
    keep = data.draw(st.lists(st.integers(-x.dim(), x.dim() - 1), max_size=3)) if x.dim() else []
    seed, stream = torch.tensor([data.draw(SEEDS)]), data.draw(st.integers(0, 2**32 - 1))
    rounding = data.draw(st.sampled_from(ROUNDINGS))
    found = native.quantize(x, seed, stream, row, rounding, keep)
    expected = reference.quantize(x, seed, stream, row, rounding, keep)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("fmt", GRIDDED)
@settings(max_examples=100)
@given(x=tensors(FLOATS), seed=SEEDS, stream=st.integers(0, 2**32 - 1), rounding=st.sampled_from(ROUNDINGS))
def test_native_rounding_has_the_bits_of_the_reference(
    fmt: str, x: Tensor, seed: int, stream: int, rounding: Rounding
) -> None:
    arguments = x, torch.tensor(seed), stream, FORMATS[fmt], rounding
    assert_same(native.round_to(*arguments), reference.round_to(*arguments))


# The operators keep their promises.


@every_scaled
@every_rounding
def test_zero_empty_and_not_finite_groups(fmt: str, rounding: str) -> None:
    x = torch.randn(7, 5)
    x[0], x[1, 2], x[2, 0], x[3, 4], x[5] = 0.0, torch.nan, torch.inf, -torch.inf, 1e-42
    q, scale = quantize(x, SEED, 0, fmt, rounding, [0])
    dequantized = q.float() * scale
    assert scale.shape == (7, 1)
    assert scale[0] == 1
    assert not q[0].float().any()
    assert dequantized[1:4].isnan().all()
    assert not q[1:4].float().any()
    assert scale[5] == 2.0**-126
    step = 1.0 if FORMATS[fmt].kind == "integer" else FORMATS[fmt].max * FORMATS[fmt].eps
    assert ((dequantized - x).abs() <= step * scale)[[0, 4, 5, 6]].all()
    whole, single = quantize(x, SEED, 0, fmt, rounding, [])
    assert single.shape == ()
    assert single.isnan()
    assert not whole.float().any()
    for shape, keep in (((0, 4), [0]), ((4, 0), [0]), ((0,), []), ((2, 0, 3), [0, 2])):
        empty, ones = quantize(torch.empty(shape), SEED, 0, fmt, rounding, keep)
        assert empty.shape == shape
        assert (
            ones.shape
            == torch.empty(shape).sum([d for d in range(len(shape)) if d not in keep], keepdim=bool(keep)).shape
        )
        assert (ones == 1).all()


@every_scaled
@pytest.mark.parametrize("largest", [3.4028234663852886e38, 1e-38, 1e-45])
def test_the_range_of_fp32_is_served(fmt: str, largest: float) -> None:
    x = torch.tensor([largest, -largest, largest / 3, 0.0])
    q, scale = quantize(x, SEED, 0, fmt, "nearest", [])
    assert scale.isfinite()
    error = (q.double() * scale.double() - x.double()).abs().max()
    row = FORMATS[fmt]
    assert error <= scale.double() * (0.5 if row.kind == "integer" else row.max * row.eps / 2) * (1 + 2.0**-22)


@every_scaled
def test_memory_format_and_strides_are_kept(fmt: str) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    q, _ = quantize(x, SEED, 0, fmt, "stochastic", [])
    assert q.is_contiguous(memory_format=torch.channels_last)
    # Random numbers go by memory, so the same memory seen otherwise is rounded alike.
    seen, _ = quantize(x.permute(0, 2, 3, 1), SEED, 0, fmt, "stochastic", [])
    assert torch.equal(seen.float(), q.permute(0, 2, 3, 1).float())


def test_a_seed_repeats_and_streams_differ() -> None:
    x = torch.randn(1000)
    first = quantize(x, SEED, 0, "int8", "stochastic", [])[0]
    assert torch.equal(first, quantize(x, SEED, 0, "int8", "stochastic", [])[0])
    assert torch.equal(first, quantize(x, SEED[0], 0, "int8", "stochastic", [])[0])
    others = [quantize(x, SEED, 1, "int8", "stochastic", [])[0], quantize(x, SEED + 1, 0, "int8", "stochastic", [])[0]]
    for other in others:
        differing = (first != other).float().mean().item()
        assert (
            0.1 < differing < 0.6
        )  # a value of uniform fraction f differs with probability 2 f (1 - f), 1/3 on average


def test_results_have_no_gradient_and_rounding_passes_it_on() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    q, scale = quantize(x, SEED, 0, "fp8", "nearest", [0])
    assert not q.requires_grad
    assert not scale.requires_grad
    y = round_to(x, SEED, 0, "tf32", "nearest")
    gradient = torch.randn(3, 4).bfloat16()
    (found,) = torch.autograd.grad(y, x, gradient.float())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, gradient)


def test_rounding_to_tf32() -> None:
    below_max = FORMATS["tf32"].max
    x = torch.tensor(
        [1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-12, 3.4028234663852886e38, torch.inf, torch.nan, 2.0**-149]
    )
    found = round_to(x, SEED, 0, "tf32", "nearest")
    expected = torch.tensor([1.0, 1 + 2.0**-9, -1.0, below_max, torch.inf, torch.nan, 0.0])
    assert_same(found, expected)
    floor = round_to(x[:4], SEED, 0, "tf32", "floor")
    assert_same(floor, torch.tensor([1.0, 1 + 2.0**-10, -1 - 2.0**-10, below_max]))
    assert torch.equal(round_to(found[:5], SEED, 0, "tf32", "stochastic"), found[:5])


@every_scaled
def test_values_are_exact_in_the_carrier_and_gradients_too(fmt: str) -> None:
    row = FORMATS[fmt]
    carrier, gradient = row.carrier, row.gradient
    values = torch.from_numpy(grid_of(row))
    assert torch.equal(values.to(carrier.dtype).double(), values)
    assert gradient.mantissa <= carrier.mantissa
    # The smallest gradient is a denormal of its format, which the carrier may hold as one of its own.
    assert gradient.e_min - gradient.mantissa >= carrier.e_min - carrier.mantissa
    assert gradient.max <= carrier.max


OPCHECKED = [(torch.float32, (4, 6)), (torch.bfloat16, (2, 3, 4, 5)), (torch.float16, (0, 3)), (torch.float32, ())]


@every_scaled
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_quantize_is_an_operator_that_torch_accepts(fmt: str, rounding: str) -> None:
    for dtype, shape in OPCHECKED:
        for keep in ([], [0], [-1])[: 3 if shape else 1]:
            x = torch.randn(shape).to(dtype).requires_grad_()
            torch.library.opcheck(torch.ops.qsync.quantize.default, (x, SEED, 3, fmt, rounding, keep))
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    torch.library.opcheck(torch.ops.qsync.quantize.default, (x[:, 1:], SEED, 3, fmt, rounding, [1]))


@pytest.mark.parametrize("fmt", GRIDDED)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_round_is_an_operator_that_torch_accepts(fmt: str, rounding: str) -> None:
    for dtype, shape in OPCHECKED:
        x = torch.randn(shape).to(dtype).requires_grad_()
        torch.library.opcheck(torch.ops.qsync.round.default, (x, SEED, 3, fmt, rounding))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: quantize(x, SEED, 0, "int9", "nearest", []), PrecisionError, "did you mean 'int8'"),
        (lambda x: quantize(x, SEED, 0, "bf16", "nearest", []), PrecisionError, "has no scale"),
        (lambda x: quantize(x, SEED, 0, "int8", "neerest", []), OptionError, "did you mean 'nearest'"),
        (lambda x: quantize(x, SEED, 0, "int8", "nearest", [2]), PrecisionError, "2 dimensions"),
        (lambda x: quantize(x.int(), SEED, 0, "int8", "nearest", []), PrecisionError, "torch.int32"),
        (lambda x: round_to(x, SEED, 0, "int8", "nearest"), PrecisionError, "qsync::quantize"),
        (lambda x: round_to(x, SEED, 0, "fp32", "nearest"), PrecisionError, "convert to torch.float32"),
        (lambda x: round_to(x.int(), SEED, 0, "tf32", "nearest"), PrecisionError, "torch.int32"),
        (lambda x: round_to(x, SEED, 0, "tf32", "up"), OptionError, "known: floor, nearest, stochastic"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_errors_say_what_to_do(
    call: Callable[[Tensor], object], error: type[Exception], says: str, device: str
) -> None:
    with pytest.raises(error, match=says):
        call(torch.randn(2, 3, device=device))
