"""Variance and error of rounding a tensor, compared with the reference of all kernels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.numerics import reference
from qsync_fx.formats import FORMATS, Precision
from qsync_fx.predictor.indicator.rounding_variance import (
    error,
    noise,
    scale,
    step,
)

ROUNDINGS = ("stochastic", "nearest", "floor")
NARROW = [fmt for fmt in FORMATS.values() if fmt.bits < 32]
SAMPLES = 20_000


def rounded(
    x: Tensor, fmt: Precision, rounding: str, keep: tuple[int, ...] = (), seed: int = 0
) -> Tensor:
    if fmt.scaled:
        q, factor = reference.quantize(x, torch.tensor([seed]), 0, fmt, rounding, keep)
        return q.double() * factor.double()
    return reference.round_to(x, torch.tensor([seed]), 0, fmt, rounding).double()


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_variance_of_stochastic_rounding_is_that_of_the_reference(fmt: Precision) -> None:
    """Copies of a tensor have the same scale, so that one call draws many samples."""
    x = torch.randn(20, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 1, 20)
    errors = rounded(x.expand(SAMPLES, -1).contiguous(), fmt, "stochastic") - x.double()
    wanted = noise(x, fmt)
    assert float(errors.square().mean(0).sum() / wanted.sum()) == pytest.approx(1, abs=0.02)
    assert torch.allclose(
        errors.square().mean(0), wanted, rtol=0.15, atol=float(wanted.max()) * 1e-3
    )
    assert errors.mean(0).abs().max() < 5 * (wanted.max() / SAMPLES).sqrt()  # unbiased


@pytest.mark.parametrize("rounding", ["nearest", "floor"])
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_error_of_other_roundings_is_that_of_the_reference(fmt: Precision, rounding: str) -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(5)) * torch.logspace(-6, 2, 4000)
    wanted = rounded(x, fmt, rounding) - x.double()
    result = error(x, fmt, rounding)  # type: ignore[arg-type]
    tied = (result.abs() == wanted.abs()) & (
        result != wanted
    )  # either rounding of a tie has the same error
    assert torch.allclose(
        torch.where(tied, wanted, result), wanted, rtol=1e-5, atol=1e-7 * float(x.abs().max())
    )
    assert torch.equal(noise(x, fmt, rounding), result.square())  # type: ignore[arg-type]


def test_zeros_have_no_noise() -> None:
    """Half of a ReLU's outputs are zero, which halves the variance of proposition 2."""
    x = torch.relu(torch.randn(100_000, generator=torch.Generator().manual_seed(2)))
    for fmt in NARROW:
        assert not noise(x, fmt)[x == 0].any()

    int8 = FORMATS["int8"]
    proposition = float(scale(x, int8).square()) * x.numel() / 6
    assert float(noise(x, int8).sum()) / proposition == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("keep", [(), (0,), (1,), (0, 1), (-1,)])
@pytest.mark.parametrize("fmt", [fmt for fmt in NARROW if fmt.scaled], ids=str)
def test_scales_are_the_references(fmt: Precision, keep: tuple[int, ...]) -> None:
    x = (
        torch.randn(6, 5, generator=torch.Generator().manual_seed(4))
        * torch.logspace(-4, 4, 6)[:, None]
    )
    x[2], x[:, 3] = 0, 1e-42
    result, wanted = scale(x, fmt, keep), reference.scales(x, fmt, keep).double()
    assert torch.equal(result.expand(6, 5), wanted.expand(6, 5))


EDGES = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 3.4e38, -3.4e38, 65520.0, math.inf, -math.inf, math.nan]
)


@pytest.mark.parametrize("fmt", NARROW, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_nonfinite_elements_add_no_noise(fmt: Precision, rounding: str) -> None:
    variance = noise(EDGES, fmt, rounding)  # type: ignore[arg-type]
    if fmt.scaled:
        assert variance.isnan().all()  # the scale of the group is NaN
    else:
        assert (variance >= 0).all() and variance.isfinite().all()
        assert not variance[[0, 1, -3, -2, -1]].any()
    finite = noise(EDGES[:8], fmt, rounding)  # type: ignore[arg-type]
    assert (finite >= 0).all() and finite.isfinite().all()


@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_empty_and_scalar_tensors(fmt: Precision) -> None:
    assert noise(torch.empty(0, 3), fmt).shape == (0, 3)
    assert noise(torch.tensor(0.3), fmt).shape == ()


def test_stochastic_error_provides_its_variance() -> None:
    with pytest.raises(ValueError, match="see noise"):
        error(torch.ones(2), FORMATS["int8"], "stochastic")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=20
    ),
    st.sampled_from([fmt.name for fmt in NARROW]),
    st.sampled_from(ROUNDINGS),
)
def test_noise_is_less_than_a_step_and_repeats_on_the_grid(
    values: list[float], name: str, rounding: str
) -> None:
    x, fmt = torch.tensor(values), FORMATS[name]
    variance = noise(x, fmt, rounding)  # type: ignore[arg-type]
    factor = scale(x, fmt)
    squared_step = (step(x.double() / factor, fmt) * factor).square()
    assert (variance >= 0).all() and (variance <= squared_step * (1 + 1e-6)).all()
    if not fmt.scaled and float(x.abs().max()) <= fmt.max:
        on_grid = reference.round_to(x, torch.tensor([0]), 0, fmt, "nearest").float()
        assert not noise(on_grid, fmt, rounding).any()  # type: ignore[arg-type]
