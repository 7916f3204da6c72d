"""Scalar arithmetic of the CUDA kernels, compiled for the CPU and compared with torch: division,
rounding, random numbers.

The inputs are cases that are rare in the matrices of test_cuda_quantizer.py: quotients next to
ties, fractions next to the random number of their comparison, scales at the limits of the range.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda.codegen import QUANTIZER_FORMATS, ROUNDINGS
from qsync_fx.backend.numerics import philox, reference
from qsync_fx.formats import precision
from qsync_fx.rounding import rounding_mode

TESTS = Path(__file__).parents[3]
N = 1 << 16

every_format = pytest.mark.parametrize("fmt", QUANTIZER_FORMATS)
every_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
SEEDS = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture(scope="session")
def functions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("rounding") / "rounding.so"
    flags = [
        "-std=c++17",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-shared",
        "-fPIC",
    ]
    command = [
        "g++",
        *flags,
        f"-I{TESTS.parent}/cpp/cutlass",
        str(TESTS / "support" / "cuda" / "on_cpu" / "rounding_on_cpu.cpp"),
        "-o",
        str(library),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(library))


def pointer(t: Tensor) -> ctypes.c_void_p:
    assert t.is_contiguous()
    return ctypes.c_void_p(t.data_ptr())


def floats(n: int, generator: torch.Generator, low: int = -149, high: int = 127) -> Tensor:
    """Return FP32 numbers of every exponent and both signs, some with few bits, so that quotients
    are near ties.
    """
    exponent = torch.randint(low, high + 1, (n,), generator=generator)
    mantissa = 1 + torch.randint(0, 1 << 23, (n,), generator=generator).double() * 2.0**-23
    few = torch.rand(n, generator=generator) < 0.3
    mantissa[few] = (mantissa[few] * 8).round() / 8
    sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return (sign * mantissa * torch.exp2(exponent.double())).float()


def fresh(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & (2**63 - 1))


@settings(max_examples=10)
@given(seed=SEEDS)
def test_quotients_are_rounded_correctly(functions: ctypes.CDLL, seed: int) -> None:
    """Check quotients from 2**-34, below which rounding does not depend on the value, for scales
    from 2**-126.
    """
    generator = fresh(seed)
    scale = floats(N, generator, -126, 109).abs()
    scale[:64] = 2.0**-126
    x = (scale.double() * floats(N, generator, -40, 16).double()).float()
    # Products of numbers with few bits: the quotients are ties, up to the last bit.
    half = N // 2
    x[:half] = (
        scale[:half].double() * (torch.randint(1, 1 << 12, (half,), generator=generator) + 0.5)
    ).float()
    quotients, wanted = torch.empty(N), x / scale
    functions.quotients(ctypes.c_int64(N), pointer(x), pointer(scale), pointer(quotients))
    large = wanted.abs() >= 2.0**-34
    assert large.sum() > N // 2
    assert torch.equal(quotients[large], wanted[large])
    assert (quotients[~large].abs() < 2.0**-33).all()


def rounded(
    functions: ctypes.CDLL, fmt: str, rounding: str, x: Tensor, scale: Tensor, sixteen: Tensor
) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.uint8)
    options = QUANTIZER_FORMATS[fmt], ROUNDINGS[rounding], ctypes.c_int64(x.numel())
    functions.round_each(*options, pointer(x), pointer(scale), pointer(sixteen), pointer(out))
    return out


def assert_rounded(
    functions: ctypes.CDLL, fmt: str, rounding: str, x: Tensor, scale: Tensor, sixteen: Tensor
) -> None:
    row, mode = precision(fmt), rounding_mode(rounding)
    random = (sixteen.float() + 0.5) * 2.0**-16
    value = reference.to_grid(x / scale, row, mode, random if rounding == "stochastic" else None)
    wanted = value.to(row.dtype).view(torch.uint8)
    result = rounded(functions, fmt, rounding, x, scale, sixteen.to(torch.uint16))
    wrong = (result != wanted).nonzero().flatten()[:3].tolist()
    assert not wrong, [
        (float(x[i]), float(scale[i]), int(sixteen[i]), int(result[i]), int(wanted[i]))
        for i in wrong
    ]


@every_format
@every_rounding
@settings(max_examples=8)
@given(seed=SEEDS)
def test_values_of_every_size(functions: ctypes.CDLL, fmt: str, rounding: str, seed: int) -> None:
    generator = fresh(seed)
    scale = floats(N, generator, -126, 110).abs()
    # Values do not exceed the maximum that their scale is computed from.
    largest = (scale.double() * precision(fmt).max).float()
    assert ((largest / precision(fmt).max) <= scale * (1 + 2.0**-23)).all()
    x = (largest.double() * floats(N, generator, -40, -1).double()).float()
    x[:100], x[100:200], x[200:300], x[300:400] = largest[:100], -largest[100:200], 0.0, -0.0
    assert_rounded(
        functions, fmt, rounding, x, scale, torch.randint(0, 1 << 16, (N,), generator=generator)
    )


@every_format
@every_rounding
@settings(max_examples=8)
@given(seed=SEEDS)
def test_values_next_to_where_the_rounding_turns(
    functions: ctypes.CDLL, fmt: str, rounding: str, seed: int
) -> None:
    """Check numbers of the format plus a fraction of a step (the random number, 1/2 or 0), and the
    FP32 neighbours of the sums.
    """
    generator, row = fresh(seed), precision(fmt)
    sixteen = torch.randint(0, 1 << 16, (N,), generator=generator)
    sixteen[: N // 8] = torch.randint(0, 3, (N // 8,), generator=generator) - 1 & 0xFFFF
    every = torch.arange(256, dtype=torch.uint8).view(row.dtype).double()
    every = every[every.abs() < row.max]
    start = every[torch.randint(0, every.numel(), (N,), generator=generator)]
    if row.kind == "integer":
        step = torch.ones_like(start)
    else:
        step = (
            torch.exp2(torch.frexp(start.abs())[1].double() - 1).clamp(min=2.0**row.e_min) * row.eps
        )
    parts = torch.stack(
        [
            (sixteen + 0.5) * 2.0**-16,
            1 - (sixteen + 0.5) * 2.0**-16,
            torch.full((N,), 0.5),
            torch.zeros(N),
        ]
    )
    part = parts[torch.randint(0, 4, (N,), generator=generator), torch.arange(N)]
    x = (start + step * part).float()
    towards = torch.tensor([-torch.inf, 0.0, torch.inf])[
        torch.randint(0, 3, (N,), generator=generator)
    ]
    x = torch.where(towards == 0, x, torch.nextafter(x, towards))
    tiny = torch.rand(N, generator=generator) < 0.05
    x[tiny] = floats(N, generator, -149, -10)[tiny]
    scale = torch.exp2(torch.randint(-100, 100, (N,), generator=generator).float())
    shifted = x * scale
    exact = (shifted / scale == x) & (x.abs() <= row.max)
    assert exact.sum() > N // 2
    assert_rounded(functions, fmt, rounding, shifted[exact], scale[exact], sixteen[exact])


@every_format
def test_exact_values_are_unchanged(functions: ctypes.CDLL, fmt: str) -> None:
    row = precision(fmt)
    every = torch.arange(256, dtype=torch.uint8).view(row.dtype).float()
    every = every[every.abs() <= row.max]
    for sixteen in (0, 1, 32767, 32768, 65535):
        for rounding in ROUNDINGS:
            words = torch.full(every.shape, sixteen)
            assert_rounded(functions, fmt, rounding, every, torch.ones_like(every), words)
            result = rounded(
                functions, fmt, rounding, every, torch.ones_like(every), words.to(torch.uint16)
            )
            assert torch.equal(result.view(row.dtype).float(), every)


def test_every_half(functions: ctypes.CDLL) -> None:
    result = torch.empty(65536)
    functions.widen_halves(pointer(result))
    wanted = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_is_that_of_the_mirror(functions: ctypes.CDLL, words: list[int]) -> None:
    counter, key, out = (
        (ctypes.c_uint32 * 4)(*words[:4]),
        (ctypes.c_uint32 * 2)(*words[4:]),
        (ctypes.c_uint32 * 4)(),
    )
    functions.philox(counter, key, out)
    assert [int(word) for word in philox.philox4x32(*map(torch.tensor, words))] == list(out)


@settings(max_examples=30)
@given(seed=SEEDS, stream=st.integers(0, 2**32 - 1), n=st.integers(1, 3000))
def test_elements_have_the_numbers_of_the_mirror(
    functions: ctypes.CDLL, seed: int, stream: int, n: int
) -> None:
    blocks = -(-n // 8)
    out = torch.empty(8 * blocks, dtype=torch.uint16)
    functions.random_bits(
        ctypes.c_int64(blocks),
        ctypes.c_int64(0),
        ctypes.c_int64(seed),
        ctypes.c_uint32(stream),
        pointer(out),
    )
    result = (out[:n].int().float() + 0.5) * 2.0**-16
    assert torch.equal(result, philox.uniform(torch.empty(n), torch.tensor(seed), stream))
