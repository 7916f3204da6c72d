"""`qsync::quantize` and `qsync::round` as operators: edge values, layouts, seeds, gradients, and
torch's opcheck.

tests/backend/numerics/test_quantizer_reference.py compares their bits with the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.operators.quantize import quantize, round_to
from qsync_fx.errors import OptionError, PrecisionError
from qsync_fx.formats import FORMATS
from qsync_fx.rounding import ROUNDINGS
from tests.support.computing.quantized_values import GRIDDED, SCALED, assert_same, grid_of

every_scaled = pytest.mark.parametrize("fmt", SCALED)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
SEED = torch.tensor([-7262512093])


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
    ungrouped, single = quantize(x, SEED, 0, fmt, rounding, [])
    assert single.shape == ()
    assert single.isnan()
    assert not ungrouped.float().any()
    for shape, keep in (((0, 4), [0]), ((4, 0), [0]), ((0,), []), ((2, 0, 3), [0, 2])):
        empty, ones = quantize(torch.empty(shape), SEED, 0, fmt, rounding, keep)
        assert empty.shape == shape
        assert (
            ones.shape
            == torch.empty(shape)
            .sum([d for d in range(len(shape)) if d not in keep], keepdim=bool(keep))
            .shape
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
    assert error <= scale.double() * (0.5 if row.kind == "integer" else row.max * row.eps / 2) * (
        1 + 2.0**-22
    )


@every_scaled
def test_memory_format_and_strides_are_preserved(fmt: str) -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    q, _ = quantize(x, SEED, 0, fmt, "stochastic", [])
    assert q.is_contiguous(memory_format=torch.channels_last)
    # Random numbers depend on positions in memory, so a view is rounded to the same values.
    permuted, _ = quantize(x.permute(0, 2, 3, 1), SEED, 0, fmt, "stochastic", [])
    assert torch.equal(permuted.float(), q.permute(0, 2, 3, 1).float())


def test_a_seed_repeats_and_streams_differ() -> None:
    x = torch.randn(1000)
    first = quantize(x, SEED, 0, "int8", "stochastic", [])[0]
    assert torch.equal(first, quantize(x, SEED, 0, "int8", "stochastic", [])[0])
    assert torch.equal(first, quantize(x, SEED[0], 0, "int8", "stochastic", [])[0])
    others = [
        quantize(x, SEED, 1, "int8", "stochastic", [])[0],
        quantize(x, SEED + 1, 0, "int8", "stochastic", [])[0],
    ]
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
    (passed,) = torch.autograd.grad(y, x, gradient.float())
    assert passed.dtype == torch.bfloat16
    assert torch.equal(passed, gradient)


def test_rounding_to_tf32() -> None:
    below_max = FORMATS["tf32"].max
    x = torch.tensor(
        [
            1 + 2.0**-11,
            1 + 3 * 2.0**-11,
            -1 - 2.0**-12,
            3.4028234663852886e38,
            torch.inf,
            torch.nan,
            2.0**-149,
        ]
    )
    rounded = round_to(x, SEED, 0, "tf32", "nearest")
    expected = torch.tensor([1.0, 1 + 2.0**-9, -1.0, below_max, torch.inf, torch.nan, 0.0])
    assert_same(rounded, expected)
    floor = round_to(x[:4], SEED, 0, "tf32", "floor")
    assert_same(floor, torch.tensor([1.0, 1 + 2.0**-10, -1 - 2.0**-10, below_max]))
    assert torch.equal(round_to(rounded[:5], SEED, 0, "tf32", "stochastic"), rounded[:5])


@every_scaled
def test_values_are_exact_in_the_carrier_and_gradients_too(fmt: str) -> None:
    row = FORMATS[fmt]
    carrier, gradient = row.carrier, row.gradient
    values = torch.from_numpy(grid_of(row))
    assert torch.equal(values.to(carrier.dtype).double(), values)
    assert gradient.mantissa <= carrier.mantissa
    # The smallest gradient is a denormal of its format, and may be a denormal of the compute dtype.
    assert gradient.e_min - gradient.mantissa >= carrier.e_min - carrier.mantissa
    assert gradient.max <= carrier.max


OPCHECKED = [
    (torch.float32, (4, 6)),
    (torch.bfloat16, (2, 3, 4, 5)),
    (torch.float16, (0, 3)),
    (torch.float32, ()),
]


@every_scaled
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_quantize_is_an_operator_that_torch_accepts(fmt: str, rounding: str) -> None:
    for dtype, shape in OPCHECKED:
        for keep in ([], [0], [-1])[: 3 if shape else 1]:
            x = torch.randn(shape).to(dtype).requires_grad_()
            torch.library.opcheck(
                torch.ops.qsync.quantize.default, (x, SEED, 3, fmt, rounding, keep)
            )
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
        (
            lambda x: quantize(x, SEED, 0, "int9", "nearest", []),
            PrecisionError,
            "did you mean 'int8'",
        ),
        (lambda x: quantize(x, SEED, 0, "bf16", "nearest", []), PrecisionError, "has no scale"),
        (
            lambda x: quantize(x, SEED, 0, "int8", "neerest", []),
            OptionError,
            "did you mean 'nearest'",
        ),
        (lambda x: quantize(x, SEED, 0, "int8", "nearest", [2]), PrecisionError, "2 dimensions"),
        (
            lambda x: quantize(x.int(), SEED, 0, "int8", "nearest", []),
            PrecisionError,
            "torch.int32",
        ),
        (lambda x: round_to(x, SEED, 0, "int8", "nearest"), PrecisionError, "qsync::quantize"),
        (
            lambda x: round_to(x, SEED, 0, "fp32", "nearest"),
            PrecisionError,
            "convert to torch.float32",
        ),
        (lambda x: round_to(x.int(), SEED, 0, "tf32", "nearest"), PrecisionError, "torch.int32"),
        (
            lambda x: round_to(x, SEED, 0, "tf32", "up"),
            OptionError,
            "known: floor, nearest, stochastic",
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_errors_have_a_remedy(
    call: Callable[[Tensor], object], error: type[Exception], says: str, device: str
) -> None:
    with pytest.raises(error, match=says):
        call(torch.randn(2, 3, device=device))
