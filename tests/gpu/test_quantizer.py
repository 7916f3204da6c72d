"""GPU quantizer: bits of the reference for all tensors, unbiased rounding, transposed output."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.numerics import philox, reference
from qsync_fx.backend.operators.quantize import quantize, quantize_transposed
from qsync_fx.formats import precision
from tests.gpu import kit

TYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = ("int8", "fp8", "fp8_e5m2")
SHAPES = (
    (1, 1),
    (1, 7),
    (7, 1),
    (33, 5),
    (64, 256),
    (129, 1030),
    (1000, 777),
    (3, 100_003),
    (2048, 4096),
)
SEED = 0x0123456789ABCDEF


def seed(value: int = SEED) -> Tensor:
    return torch.tensor([value], device=kit.DEVICE)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8 if t.itemsize == 1 else torch.int32)


def assert_reference(x: Tensor, fmt: str, rounding: str, keep: tuple[int, ...]) -> None:
    """Assert that the kernel ran and that its bits equal the reference's on the GPU."""
    launch_utils.forget()
    row = precision(fmt)
    q, scale = quantize(x, seed(), 5, fmt, rounding, keep)
    assert not launch_utils.reasons() or not x.numel()
    want, want_scale = reference.quantize(x, seed(), 5, row, rounding, keep)  # type: ignore[arg-type]
    assert (q.stride(), q.dtype, scale.shape) == (want.stride(), want.dtype, want_scale.shape)
    assert torch.equal(scale.isnan(), want_scale.isnan())
    assert torch.equal(bits(scale.nan_to_num(1.0)), bits(want_scale.nan_to_num(1.0)))
    assert torch.equal(bits(q), bits(want))


def on_cpu(x: Tensor, fmt: str, rounding: str) -> Tensor:
    """Quantize on the CPU with the GPU's random numbers."""
    row, x = precision(fmt), x.cpu()
    q = reference.empty_quantized(x, row.dtype)
    scale = reference.scales(x, row, ())
    random = philox.uniform(q, torch.tensor([SEED]), 5) if rounding == "stochastic" else None
    return q.copy_(reference.to_grid(x.float() / scale, row, rounding, random))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "floor"])
def test_bits_of_the_reference(dtype: torch.dtype, fmt: str, rounding: str) -> None:
    for shape, keep in itertools.product(SHAPES, ((), (0,), (1,))):
        assert_reference((torch.randn(shape, device=kit.DEVICE) * 3).to(dtype), fmt, rounding, keep)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_bits_of_the_mirror_on_the_cpu(fmt: str, rounding: str) -> None:
    for shape in SHAPES[:-1]:
        x = torch.randn(shape, device=kit.DEVICE)
        q, _ = quantize(x, seed(), 5, fmt, rounding, ())
        assert torch.equal(bits(q.cpu()), bits(on_cpu(x, fmt, rounding)))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_layouts(fmt: str, dtype: torch.dtype) -> None:
    images = torch.randn(4, 24, 7, 9, device=kit.DEVICE).to(dtype)
    wide = torch.randn(65, 130, device=kit.DEVICE).to(dtype)
    for x, keep in [
        (images.contiguous(memory_format=torch.channels_last), ()),
        (images.contiguous(memory_format=torch.channels_last), (1,)),
        (images, (0,)),
        (wide[:, 3:], ()),
        (wide[:, 3:], (0,)),
        (wide.t(), (0,)),
        (wide[::2, ::3], ()),
        (wide.flatten()[1:], ()),
    ]:
        assert_reference(x, fmt, "stochastic", keep)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("keep", [(), (0,), (1,)])
def test_odd_values(fmt: str, dtype: torch.dtype, keep: tuple[int, ...]) -> None:
    """Zeros, the smallest and largest numbers, NaN and infinities, row by row and together."""
    info = torch.finfo(dtype)
    values = [
        0.0,
        -0.0,
        info.tiny,
        info.smallest_normal / 4,
        info.max,
        info.min,
        torch.inf,
        -torch.inf,
        torch.nan,
    ]
    x = torch.randn(len(values), 40, device=kit.DEVICE).to(dtype)
    for row, value in enumerate(values):
        x[row, row] = value
        if value == 0:
            x[row] = value
    assert_reference(x, fmt, "stochastic", keep)
    for row in range(len(values)):
        assert_reference(x[row : row + 1], fmt, "nearest", keep)


def test_empty() -> None:
    for shape in ((0,), (0, 8), (8, 0)):
        q, scale = quantize(
            torch.empty(shape, device=kit.DEVICE), seed(), 0, "int8", "stochastic", ()
        )
        assert q.shape == shape and scale.item() == 1


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_transpose_in_the_same_pass(fmt: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = torch.randn(shape, device=kit.DEVICE).to(dtype)
        launch_utils.forget()
        q, transposed, scale = quantize_transposed(x, seed(), 5, fmt, "stochastic")
        assert not launch_utils.reasons()
        assert transposed.is_contiguous() and torch.equal(bits(transposed), bits(q.t()))
        plain, plain_scale = quantize(x, seed(), 5, fmt, "stochastic", ())
        assert torch.equal(bits(q), bits(plain)) and torch.equal(scale, plain_scale)


@pytest.mark.parametrize("fmt", FORMATS)
def test_unbiased(fmt: str) -> None:
    """The mean error of stochastic rounding is zero (QSync, section IV-A) up to its standard
    deviation; "floor" is biased.
    """
    repeats = 400
    x = torch.randn(512, 256, device=kit.DEVICE)

    def errors(rounding: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean error, and the minimum and maximum: the distances to both levels."""
        total = torch.zeros_like(x, dtype=torch.float64)
        least, most = torch.full_like(total, torch.inf), torch.full_like(total, -torch.inf)
        for value in range(repeats):
            q, scale = quantize(x, seed(value), 1, fmt, rounding, ())
            draw = kit.wide(q) * scale.double() - x.double()
            total, least, most = total + draw, least.minimum(draw), most.maximum(draw)
        return total / repeats, least, most

    mean, least, most = errors("stochastic")
    # For probability `up` of rounding up, the variance of one draw is -least * most.
    gap, deviation = most - least, (-least * most / repeats).clamp(min=0).sqrt()
    up = -least / gap
    often = (gap > 0) & (up * repeats > 4) & ((1 - up) * repeats > 4)
    assert often.float().mean() > 0.8
    z = mean[often].sum() / deviation[often].square().sum().sqrt()
    assert abs(float(z)) < 6
    # Random numbers have 16 bits.
    assert float(((mean.abs() - 2.0**-16 * gap) / deviation)[often].max()) < 9
    below, _, _ = errors("floor")
    assert float(below.mean()) < -10 * abs(float(mean.mean()))


def test_streams_and_seeds_are_distinct() -> None:
    x = torch.rand(256, 256, device=kit.DEVICE)
    results = [
        quantize(x, seed(s), stream, "int8", "stochastic", ())[0]
        for s, stream in ((1, 0), (1, 0), (2, 0), (1, 1))
    ]
    assert torch.equal(results[0], results[1])
    for other in results[2:]:
        different = (results[0] != other).float().mean()
        assert 0.2 < float(different) < 0.45  # 1/3 on average for independent roundings
