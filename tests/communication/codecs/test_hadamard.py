"""Randomized Hadamard transform before QSGD: inverse, signs, and effect on rounding variance."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional

from benchmarks.paper.support import studied
from qsync_fx.communication.bucket import piece
from qsync_fx.communication.codecs import Draw, codec_named, hadamard
from qsync_fx.communication.codecs.codec import Codec
from qsync_fx.communication.codecs.qsgd import UNITS
from qsync_fx.communication.compressor_state import CompressorState
from tests.support import tiers

PAIRS = [("qsgd2", "qsgd2h"), ("qsgd4", "qsgd4h"), ("qsgd8", "qsgd8h")]
every_pair = pytest.mark.parametrize(("plain", "rotated"), PAIRS, ids=lambda name: name)
every_rotated = pytest.mark.parametrize("name", [rotated for _, rotated in PAIRS])
SIZES = st.sampled_from([2**power for power in range(1, 12)])


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def coded(codec: Codec, x: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return the encoded message, and the values decoded from it."""
    wire, result = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, wire, draw)
    codec.decode(wire, result)
    return wire, result


def signs(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


@given(size=SIZES, blocks=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_inverse_is_exact_where_sums_are(size: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**12), 2**12, (blocks, size), generator=generator).float()
    negative = signs((blocks, size), seed)
    y = hadamard.transform(x, negative)
    assert torch.equal(hadamard.inverse(y, negative), x)
    # H / sqrt(size) is orthonormal.
    energy = y.double().square().sum(1) / size
    torch.testing.assert_close(energy, x.double().square().sum(1), rtol=1e-12, atol=0)


@given(size=SIZES, scale=st.integers(-100, 100), seed=st.integers(0, 2**32))
def test_inverse_rounds_like_fp32(size: int, scale: int, seed: int) -> None:
    x, negative = normal(3 * size, seed).view(3, size) * 2.0**scale, signs((3, size), seed)
    error = (hadamard.inverse(hadamard.transform(x, negative), negative) - x).double().norm()
    assert float(error) <= 2.0**-24 * (2 * math.log2(size) + 1) * float(x.double().norm())


def test_transform_is_the_hadamard_matrix() -> None:
    linalg = pytest.importorskip("scipy.linalg")
    negative = signs((1, 64), 0)
    for column in range(64):
        x = functional.one_hot(torch.tensor([column]), 64).float()
        expected = linalg.hadamard(64)[:, column] * (-1 if negative[0, column] else 1)
        assert hadamard.transform(x, negative)[0].tolist() == expected.tolist()


@every_rotated
def test_rounding_is_unbiased_and_has_the_computed_variance(name: str) -> None:
    codec, repeats, n = codec_named(name), 1500, 300
    x = normal(n) ** 3
    x[:2] = torch.tensor([0.0, 30.0])
    results = [coded(codec, x, Draw(seed, 5))[1] for seed in range(repeats)]
    errors = (torch.stack(results) - x).double()
    spread = errors.std(0) / repeats**0.5
    assert float((errors.mean(0).abs() / spread).max()) < 5.5
    # `variance` uses one rotation for all draws, and x has few blocks.
    assert codec.variance(x) == pytest.approx(float(errors.square().sum(1).mean()), rel=0.15)
    x = normal(100_000) ** 3
    errors = (coded(codec, x, Draw(1))[1] - x).double()
    assert codec.variance(x) == pytest.approx(float(errors.square().sum()), rel=0.05)


@every_rotated
def test_variance_of_one_rotation_is_exact(name: str) -> None:
    """This includes a partial last unit, over which the inverse spreads the error."""
    codec = codec_named(name)
    x = normal(codec.unit + 7) ** 3
    errors = []
    for stream in range(1500):  # the signs do not depend on the stream
        errors.append((coded(codec, x, Draw(0, stream))[1] - x).double())
    squares = torch.stack(errors).square().mean(0)
    assert codec.variance(x) == pytest.approx(float(squares.sum()), rel=0.05)
    assert codec.variance(x) - codec.variance(x[: codec.unit]) == pytest.approx(
        float(squares[codec.unit :].sum()), rel=0.1
    )


@every_pair
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), degrees=st.sampled_from([2.0, 3.0, 4.0]))
def test_variance_is_lower_with_heavy_tails(
    plain: str, rotated: str, seed: int, degrees: float
) -> None:
    """In Student's t distribution, the largest magnitude of a unit grows with the unit size."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_t(degrees, 2**15)).float()
    assert codec_named(rotated).variance(x) < 0.9 * codec_named(plain).variance(x)


@every_pair
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32), scale=st.integers(-60, 60))
def test_variance_of_normal_values_does_not_change(
    plain: str, rotated: str, seed: int, scale: int
) -> None:
    x = normal(2**19, seed) * 2.0**scale
    ratio = codec_named(rotated).variance(x) / codec_named(plain).variance(x)
    assert ratio == pytest.approx(1, abs=0.06)


@tiers.ALL
def test_variance_of_a_language_model_is_lower() -> None:
    """Two-layer GPT-2, trained for 30 steps on texts of installed packages."""
    task = studied.gpt(1, 0, quick=True)
    optimizer = task.optimizer(task.model.parameters(), task.rate / 3)
    for parts in itertools.islice(itertools.cycle(task.batches()), 30):
        optimizer.zero_grad()
        task.loss(task.model, parts[0]).backward()
        optimizer.step()
    gradients = [
        parameter.grad.flatten()
        for parameter in task.model.parameters()
        if parameter.grad is not None and parameter.numel() >= 2048
    ]
    ratios = {}
    for plain, rotated in PAIRS:
        both = [
            (codec_named(plain).variance(g), codec_named(rotated).variance(g)) for g in gradients
        ]
        ratios[rotated] = sum(b for _, b in both) / sum(a for a, _ in both)
        lower = sum(b < a for a, b in both)
        assert lower >= 0.7 * len(both), "the rotation lowers the variance of most parameters"
    assert ratios["qsgd4h"] < 0.85 and ratios["qsgd8h"] < 0.85
    # The gradient of the embedding is the largest and has light tails in units of 128 values.
    assert ratios["qsgd2h"] > 1


@every_pair
def test_variance_is_higher_with_zeros(plain: str, rotated: str) -> None:
    """Zero has no rounding error, unless it is rotated with nonzero values."""
    size = UNITS[codec_named(plain).bits]  # type: ignore[attr-defined]
    x = torch.zeros(64, size)
    x[:, :3] = normal(3 * 64).view(64, 3).sign()
    assert codec_named(plain).variance(x.flatten()) == pytest.approx(0, abs=1e-9)
    assert codec_named(rotated).variance(x.flatten()) > 1e-3


def test_ranks_share_the_signs_of_a_step() -> None:
    codec, x = codec_named("qsgd4h"), normal(2048)
    states = [CompressorState(rank, 3, "", seed=7) for rank in range(3)]
    slices = [piece(name, index, (2048,), codec, 3) for index, name in enumerate("ab")]
    draws = [
        state.draw(parameter, step, 512, summed)
        for step in (0, 1)
        for state in states
        for parameter in slices
        for summed in (False, True)
    ]
    messages = [coded(codec, x, draw)[0] for draw in draws]
    headers = [bytes(message[:4].numpy()) for message in messages]
    by_step = [set(headers[:12]), set(headers[12:])]
    assert [len(item) for item in by_step] == [1, 1] and by_step[0] != by_step[1]
    codes = {bytes(message[4:].numpy()) for message in messages}
    assert len(codes) == 16, "ranks round gradients independently, and means equally"


@every_rotated
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_reach_their_unit_only(name: str, bad: float) -> None:
    codec = codec_named(name)
    n = 2 * codec.unit + 3
    for index in (0, codec.unit - 1, n - 1):
        x = torch.ones(n)
        x[index] = bad
        _, result = coded(codec, x, Draw())
        expected = torch.arange(n) // codec.unit == index // codec.unit
        assert torch.equal(result.isnan(), expected)
        assert result[~expected].isfinite().all()


@every_rotated
def test_extreme_values(name: str) -> None:
    codec = codec_named(name)
    for x in (torch.zeros(300), torch.empty(0), torch.full((300,), -0.0)):
        assert not coded(codec, x, Draw())[1].any()
    largest = torch.finfo(torch.float32).max / codec.unit**2
    for x in (torch.full((700,), largest), torch.full((700,), -largest)):
        assert coded(codec, x, Draw(3))[1].isfinite().all()
    x_single = torch.zeros(codec.unit)
    x_single[5] = 2.0**-120
    assert torch.equal(coded(codec, x_single, Draw())[1], x_single), (
        "all transformed magnitudes equal the scale"
    )


@every_rotated
def test_bytes_exceed_those_without_rotation_by_the_counter(name: str) -> None:
    codec, plain = codec_named(name), codec_named(name[:-1])
    assert codec.nbytes(0) == codec.theory(0) == 0
    for units in (1, 3, 1000):
        n = units * codec.unit
        assert codec.nbytes(n) == codec.nbytes(n - 1) == plain.nbytes(n) + 4
        assert codec.theory(n) == codec.theory(n - 1) == plain.theory(n)
