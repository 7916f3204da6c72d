"""Properties of codecs from their papers: unbiasedness, error bounds, error feedback and message
sizes.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from qsync_fx.communication.codecs import NAMES, Codec, Draw, codec_named
from qsync_fx.communication.codecs.onebit import Reshaped
from qsync_fx.communication.codecs.qsgd import Qsgd
from qsync_fx.communication.codecs.truncation import LEVELS, Truncated
from qsync_fx.errors import OptionError, QSyncError
from qsync_fx.formats import FORMATS
from tests.support.computing.native_reference import vectors

HUGE = torch.finfo(torch.float32).max
KINDS = [
    Qsgd(bits, 128, norm, layout)
    for bits in (2, 4, 8, 16)
    for norm in ("max", "two")
    for layout in ("sign", "endpoints")
]
every_kind = pytest.mark.parametrize(
    "codec", KINDS, ids=lambda codec: f"{codec.name}-{codec.norm}-{codec.layout}"
)


def sent(
    codec: Codec, x: Tensor, draw: Draw | None = None, residual: Tensor | None = None
) -> Tensor:
    """Encode values and return the decoded ones."""
    wire, decoded = torch.empty(codec.nbytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    codec.encode(x, wire, draw or Draw(), residual)
    codec.decode(wire, decoded)
    return decoded


def scale(codec: Qsgd, x: Tensor) -> Tensor:
    return (x.double().norm() if codec.norm == "two" else x.abs().max()).double()


def step(codec: Qsgd, x: Tensor) -> float:
    return float(scale(codec, x)) * (1 if codec.layout == "sign" else 2) / codec.levels


def rounding(codec: Qsgd, x: Tensor) -> float:
    """Return a bound on the FP32 rounding error of scaling a value to steps and back."""
    return float(scale(codec, x)) * 2.0**-21


@every_kind
def test_qsgd_is_unbiased_within_a_step_and_its_variance_within_the_bound(codec: Qsgd) -> None:
    x, repeats = torch.randn(128), 2000
    x[:4] = torch.tensor([0.0, float(x.abs().max()), -1e-3, 1e-6])
    decoded = torch.stack([sent(codec, x, Draw(seed, 5)) for seed in range(repeats)]).double()
    errors, width = decoded - x.double(), step(codec, x)
    assert float(errors.abs().max()) < width + rounding(codec, x)
    position = (x.double() + (float(scale(codec, x)) if codec.layout == "endpoints" else 0)) / width
    chance = position - position.floor()
    # The mean of a rare rounding direction is not yet normally distributed.
    inner = repeats * chance * (1 - chance) > 50
    spread = width * (chance * (1 - chance) / repeats).sqrt()
    assert float((errors.mean(0).abs() / spread)[inner].max()) < 5.5
    variance, d, s = float(errors.square().sum(1).mean()), x.numel(), codec.levels
    if codec.layout == "sign":
        norm = float(scale(codec, x))
        bound = (
            d * norm**2 / (4 * s**2) if codec.norm == "max" else min(d / s**2, d**0.5 / s) * norm**2
        )
        assert variance <= bound
    assert variance <= d * width**2 / 4
    assert codec.variance(x) == pytest.approx(variance, rel=0.05)


@every_kind
@given(data=st.data(), n=st.integers(1, 128))
def test_qsgd_error_is_at_most_a_step(codec: Qsgd, data: st.DataObject, n: int) -> None:
    x = data.draw(vectors(n, finite=True))
    decoded = sent(codec, x, Draw(data.draw(st.integers(0, 2**64 - 1)), 1))
    assert decoded.isfinite().all()
    # Subnormal values are rounded to a multiple of 2**-149.
    limit = step(codec, x) + rounding(codec, x) + 2 * 2.0**-149
    if float(scale(codec, x)) > HUGE:
        limit = math.inf
    assert float((decoded.double() - x.double()).abs().max()) <= limit


@every_kind
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_qsgd_propagates_nonfinite_values(codec: Qsgd, bad: float) -> None:
    x = torch.ones(300)
    for index in (0, 127, 17):
        x[index] = bad
        decoded = sent(codec, x)
        assert decoded[:128].isnan().all()
        assert decoded[128:].isfinite().all()
        x[index] = 1
    assert not sent(codec, torch.zeros(300)).any()
    assert sent(codec, torch.full((300,), HUGE)).isfinite().all()
    assert sent(codec, torch.empty(0)).numel() == 0


@given(data=st.data(), n=st.integers(0, 700), size=st.sampled_from([1, 3, 64, 512]))
def test_one_bit_preserves_the_sum_with_its_residual(
    data: st.DataObject, n: int, size: int
) -> None:
    codec = Reshaped(size)
    residual, gradient_sum, decoded = (
        torch.zeros(n),
        torch.zeros(n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
    )
    magnitude = 10.0 ** data.draw(st.integers(-30, 30))
    largest = 1e-45
    for seed in range(data.draw(st.integers(1, 12))):
        g = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * magnitude
        result = sent(codec, g, residual=residual)
        gradient_sum, decoded = gradient_sum + g, decoded + result
        largest = max([largest, *(float(t.abs().max()) for t in (residual, result, g) if n)])
        for remainder, values in zip(residual.split(size), result.split(size), strict=True):
            assert abs(float(remainder.double().sum())) <= 1e-5 * size * largest
            assert values.unique().numel() <= 2
    assert n == 0 or float((decoded + residual - gradient_sum).abs().max()) <= 1e-5 * largest


def test_empty_one_bit_class_has_mean_zero() -> None:
    codec, wire = Reshaped(64), torch.empty(16, dtype=torch.uint8)
    for sign in (1.0, -1.0):
        codec.encode(torch.full((64,), 3 * sign), wire, Draw())
        means = wire[:8].view(torch.float32).tolist()
        assert sorted(means) == sorted([3 * sign, 0.0])
    assert not sent(codec, torch.zeros(64)).any()


@pytest.mark.parametrize("codec", [Reshaped(64), Truncated(12)], ids=["1bit*", "aqgb"])
def test_nonfinite_values_do_not_enter_the_residual(codec: Codec) -> None:
    residual = torch.full((128,), 0.5)
    for bad in (math.nan, math.inf, HUGE):
        x = torch.full((128,), 1.25)
        x[3] = bad
        if bad == HUGE:
            x[4] = bad
        decoded = sent(codec, x, residual=residual)
        assert decoded[3].isfinite() == (isinstance(codec, Truncated) and bad == HUGE)
        assert residual.isfinite().all()
        assert residual[3] == 0.5 or bad == HUGE
        assert decoded[64:].isfinite().all()


@given(data=st.data(), n=st.integers(0, 900), bits=st.sampled_from(LEVELS))
def test_truncation_is_towards_zero_and_within_its_bits(
    data: st.DataObject, n: int, bits: int
) -> None:
    x = data.draw(vectors(n))
    decoded = sent(Truncated(bits, 420), x)
    assert (decoded.isnan() == x.isnan()).all()
    assert (decoded.isinf() == x.isinf()).all()
    normal = x.isfinite() & (x.abs() >= torch.finfo(torch.float32).tiny)
    a, b = x[normal].double(), decoded[normal].double()
    assert (b.abs() <= a.abs()).all()
    assert ((a - b).abs() < a.abs() * 2.0 ** -(bits - 9)).all()
    assert bits < 32 or torch.equal(decoded.nan_to_num(), x.nan_to_num())


def test_partitions_of_all_levels_have_the_same_bytes() -> None:
    for bits in LEVELS:
        codec = Truncated(bits, 840)
        assert codec.unit * bits == 840 * 8
        assert codec.nbytes(3 * codec.unit) == 3 * (840 + 4)
    ratios = [bits / 32 for bits in LEVELS]
    assert ratios == [0.375, 0.5, 0.625, 0.75, 0.875, 1.0]


def test_partitions_of_several_levels_are_read_by_who_knows_none() -> None:
    x = torch.randn(700)
    wires = []
    for bits, part in ((12, x[:300]), (24, x[300:])):
        codec = Truncated(bits, 420)
        wires.append(torch.empty(codec.nbytes(part.numel()), dtype=torch.uint8))
        codec.encode(part, wires[-1], Draw())
    decoded = torch.empty(700)
    Truncated(32, 420).decode(torch.cat(wires), decoded)
    assert torch.equal(
        decoded, torch.cat([sent(Truncated(12), x[:300]), sent(Truncated(24), x[300:])])
    )


@pytest.mark.parametrize(
    "row", [row for row in FORMATS.values() if row.plain and row.bits <= 32], ids=str
)
@given(data=st.data(), n=st.integers(0, 100))
def test_casts_equal_torch(row: object, data: st.DataObject, n: int) -> None:
    x = data.draw(vectors(n))
    codec = codec_named(str(row))
    decoded, expected = sent(codec, x), x.to(FORMATS[str(row)].dtype).float()
    assert torch.equal(decoded.nan_to_num(3.0), expected.nan_to_num(3.0))
    assert (decoded.isnan() == expected.isnan()).all()
    codec.settle(settled := x.clone())
    assert torch.equal(settled.nan_to_num(3.0), expected.nan_to_num(3.0))


@pytest.mark.parametrize(
    ("name", "bits"),
    list(
        {
            "fp32": 32,
            "fp16": 16,
            "bf16": 16,
            "1bit*": 2,
            "qsgd2": 2.25,
            "qsgd4": 4.0625,
            "qsgd8": 8.0625,
            "qsgd16": 16.00390625,
        }.items()
    ),
)
def test_bytes_equal_the_study(name: str, bits: float) -> None:
    codec = codec_named(name)
    assert codec.theory(2**20) * 8 / 2**20 == bits
    assert codec.nbytes(2**20) == codec.theory(2**20)
    for n in (20_000, 100_003, 1_000_001):
        assert codec.nbytes(n) <= 1.03 * codec.theory(n)
    assert Reshaped(512).theory(2**20) * 8 / 2**20 == 1.125


def test_columns_of_resnet_50_take_more_bytes_than_fp32() -> None:
    """Artefact of CNTK that the study describes (section 3.2.2): 191.1 MB instead of 102.0 MB."""
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.device("meta"):
        model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    columns, consecutive = codec_named("1bit"), codec_named("1bit*")
    weights = [p for p in model.parameters() if p.dim() > 1]
    raw = sum(4 * p.numel() for p in weights)
    assert raw / 1e6 == pytest.approx(102.0, abs=0.05)
    assert sum(columns.fitted(p.shape).nbytes(p.numel()) for p in weights) / 1e6 == pytest.approx(
        191.1, abs=0.1
    )
    assert sum(consecutive.nbytes(p.numel()) for p in weights) / raw == pytest.approx(
        1 / 16, rel=0.01
    )


def test_columns_equal_cntk() -> None:
    codec = codec_named("1bit")
    for module, size, transposed in (
        (nn.Linear(5, 7), 7, True),
        (nn.Conv2d(2, 3, (4, 6)), 6, False),
        (nn.Conv2d(2, 3, (4, 6)).to(memory_format=torch.channels_last), 6, True),
    ):
        weight = module.weight.detach()
        fitted = codec.fitted(weight.shape)
        assert fitted.unit == size
        columns = fitted.columns(weight)
        assert (columns is not None) == transposed
        assert columns is None or columns.contiguous().shape[-1] == size
    assert codec.fitted((9,)).unit == 9
    assert codec.fitted(()).unit == 1


def test_a_codec_of_another_name_is_an_error_that_names_the_nearest() -> None:
    study = ("fp32", "bf16", "fp16", "1bit", "1bit*", "qsgd2", "qsgd4", "qsgd8", "qsgd16")
    expected = [*study, *(f"aqgb{bits}" for bits in LEVELS), "aqgb"]
    assert [name for name in NAMES if name in expected] == expected
    assert all(codec_named(name).name == name for name in NAMES)
    with pytest.raises(OptionError, match="did you mean 'qsgd8'"):
        codec_named("qsgd_8")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
def test_every_codec_implements_the_interface(name: str, bad: float) -> None:
    """Chunks of complete units decode to the same values, error feedback equals the coding error,
    and nonfinite values propagate.
    """
    codec = codec_named(name).fitted((96,))
    n, cut = 3 * codec.unit + 5, 2 * codec.unit
    x, before = torch.randn(n), torch.randn(n) if codec.residual else None
    x[1] += bad
    residual = None if before is None else before.clone()
    decoded = sent(codec, x, residual=residual)
    assert codec.nbytes(n) % 4 == 0
    assert codec.nbytes(n) <= codec.nbytes(cut) + codec.nbytes(n - cut)
    parts = [
        sent(
            codec, x[part], Draw(first=part.start), None if before is None else before[part].clone()
        )
        for part in (slice(0, cut), slice(cut, n))
    ]
    assert torch.equal(torch.cat(parts).nan_to_num(3.0), decoded.nan_to_num(3.0))
    wire, total = torch.empty(codec.nbytes(n), dtype=torch.uint8), torch.ones(n)
    codec.encode(x, wire, Draw(), None if residual is None else torch.zeros(n))
    codec.decode(wire, once := torch.empty(n))
    codec.decode(wire, total, add=True)
    torch.testing.assert_close(total, once + 1, equal_nan=True)
    assert decoded[: codec.unit].isfinite().all() == (bad == 0)
    if before is None or residual is None:
        return
    comparable = decoded.isfinite() & x.isfinite()
    comparable[: codec.unit] &= bad == 0
    torch.testing.assert_close((decoded + residual)[comparable], (x + before)[comparable])
    assert residual.isfinite().all()


def test_unsupported_kernel_arguments_are_errors() -> None:
    codec, wire = codec_named("qsgd8"), torch.empty(8192, dtype=torch.uint8)
    for values in (torch.zeros(64, dtype=torch.float64), torch.zeros(64, 2)[:, 0]):
        with pytest.raises(QSyncError, match=r"contiguous values of torch\.float32 on cpu"):
            codec.encode(values, wire, Draw())
    for short in (wire[:10], wire[::2], wire.float()):
        with pytest.raises(QSyncError, match=r"contiguous values of torch\.uint8 on cpu"):
            codec.encode(torch.zeros(640), short, Draw())
    with pytest.raises(QSyncError, match=r"at least 64 contiguous values .* not 3"):
        codec_named("1bit*").encode(torch.zeros(64), wire, Draw(), torch.zeros(3))
