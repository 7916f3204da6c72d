"""Bit-exact contract of the native quantizer on every path, and statistical tests of its random
numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from qsync_fx import _C
from tests.support.computing.native_reference import (
    DTYPES,
    ROUNDINGS,
    SEEDS,
    STREAMS,
    quantized,
    run_quantize,
    uniform,
    vectors,
)

every_isa = pytest.mark.parametrize("isa", _C.available_isas())


def same(
    actual: tuple[NDArray[np.int8], NDArray[np.float32]],
    expected: tuple[NDArray[np.int8], NDArray[np.float32]],
) -> None:
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])


@every_isa
@settings(max_examples=150)
@given(data=st.data())
def test_equals_the_reference(isa: str, data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 5))
    columns = data.draw(st.one_of(st.integers(0, 130), st.integers(0, 40_000 // max(rows, 1))))
    x = data.draw(vectors(rows * columns, data.draw(st.sampled_from(list(DTYPES.values()))))).view(
        rows, columns
    )
    rounding, levels = (
        data.draw(st.sampled_from(ROUNDINGS)),
        data.draw(st.sampled_from([127, 7, 1, 100])),
    )
    seed, stream, first = (
        data.draw(SEEDS),
        data.draw(STREAMS),
        data.draw(st.sampled_from([0, 5, 2**32 - 50, 2**63])),
    )
    threads = data.draw(st.integers(1, 4))
    result = run_quantize(x, rounding, levels, seed, stream, threads, first, isa)
    same(result, quantized(x, rounding, levels, seed, stream, first))


@every_isa
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_sixteen_bit_value(isa: str, dtype: torch.dtype, rounding: _C.Rounding) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype) if dtype.itemsize == 2 else (bits.int() << 16).view(dtype)
    x = x[x.isfinite()]
    # Rows of two values; the larger magnitude sets the scale.
    pairs = torch.stack([x, x.flip(0)], 1).contiguous()
    same(run_quantize(pairs, rounding, seed=3, isa=isa), quantized(pairs, rounding, 127, 3, 0))


@every_isa
def test_special_rows(isa: str) -> None:
    huge = torch.finfo(torch.float32).max
    x = torch.tensor(
        [
            [0.0, -0.0, 0.0],
            [1.0, torch.nan, 2.0],
            [1.0, -torch.inf, 2.0],
            [huge, -huge, 1.0],
            [1e-45, -1e-45, 0.0],
        ]
    )
    for rounding in ROUNDINGS:
        q, scales = run_quantize(x, rounding, isa=isa)
        assert scales[0] == 1.0
        assert np.isnan(scales[1:3]).all()
        assert scales[4] == np.float32(2.0**-126)
        assert not q[:3].any()
        # With "floor" the largest value may be one level lower, because the scale is rounded.
        assert q[3, 0] >= (126 if rounding == "floor" else 127)
        assert q[3, 1] == -127
    assert run_quantize(torch.empty(4, 0), "nearest", isa=isa)[1].tolist() == [1.0] * 4
    assert run_quantize(torch.empty(0, 4), "nearest", isa=isa)[1].size == 0


@pytest.mark.parametrize("shape", [(1, 200_003), (7, 40_001), (3, 9), (5003, 37), (40_001, 1)])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_result_does_not_depend_on_threads(shape: tuple[int, int], rounding: _C.Rounding) -> None:
    x = torch.randn(shape)
    alone = run_quantize(x, rounding, seed=11, stream=2)
    for threads in (2, 3, 8):
        same(run_quantize(x, rounding, seed=11, stream=2, threads=threads), alone)


@given(data=st.data(), seed=SEEDS, stream=STREAMS)
def test_chunks_equal_the_full_tensor(data: st.DataObject, seed: int, stream: int) -> None:
    x = data.draw(vectors(200, finite=True)).view(4, 50)
    cut = data.draw(st.integers(0, 4))
    full = run_quantize(x, "stochastic", seed=seed, stream=stream)
    parts = [run_quantize(x[:cut], "stochastic", seed=seed, stream=stream)]
    parts += [run_quantize(x[cut:], "stochastic", seed=seed, stream=stream, first=50 * cut)]
    same(
        (np.concatenate([parts[0][0], parts[1][0]]), np.concatenate([parts[0][1], parts[1][1]])),
        full,
    )


@every_isa
def test_result_does_not_depend_on_denormal_flushing(isa: str) -> None:
    x = torch.tensor([[1e-39, -3e-40, 2e-45, 1e-38]])
    expected = quantized(x, "stochastic", 127, 1, 1)
    assert torch.set_flush_denormal(True)
    try:
        result = run_quantize(x, "stochastic", 127, 1, 1, isa=isa)
        assert (x * 1.0 == 0).any(), "the quantizer restores the denormal mode"
    finally:
        torch.set_flush_denormal(False)
    same(result, expected)


def bias(isa: str, rounding: _C.Rounding, x: torch.Tensor, repeats: int) -> tuple[float, float]:
    """Return z of the mean error over all elements, and z of the sum of the elements' squared z."""
    total = np.zeros(x.shape, np.int64)
    for stream in range(repeats):
        q, scales = run_quantize(
            x, rounding, seed=int(torch.randint(2**62, ()).item()), stream=stream, isa=isa
        )
        total += q
    u = x.double().numpy() / scales[:, None].astype(np.float64)
    variance = repeats * (u - np.floor(u)) * (1 - (u - np.floor(u)))
    inner = variance > 1
    error = (total - repeats * u)[inner]
    squares = (error**2 / variance[inner]).sum()
    return abs(error.sum()) / variance[inner].sum() ** 0.5, (squares - inner.sum()) / (
        2 * inner.sum()
    ) ** 0.5


@every_isa
def test_stochastic_rounding_is_unbiased(isa: str) -> None:
    x = torch.randn(1, 4000).double().float()
    x[0, :1000] = x.abs().max() * (
        1 - torch.rand(1000) / 127
    )  # the last two levels, for which a rounded sum would be wrong
    mean, squares = bias(isa, "stochastic", x, 600 if isa == "scalar" else 5000)
    assert mean < 5
    assert abs(squares) < 6
    assert bias(isa, "nearest", x, 50)[1] > 50, "the statistic detects a biased rounding"


N = 2**19


def correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Return the correlation of two samples of uniform numbers, in standard errors."""
    return float(
        ((a.astype(np.float64) - 0.5) * (b.astype(np.float64) - 0.5)).mean() * 12 * a.size**0.5
    )


@settings(max_examples=10)
@given(seed=SEEDS, stream=STREAMS, first=st.sampled_from([0, 2**32 - N // 2, 2**40]))
def test_random_numbers_are_uniform_and_independent(seed: int, stream: int, first: int) -> None:
    r = uniform(N, seed, stream, first)
    assert r.min() >= 0
    assert r.max() < 1
    words = (r * np.float32(2**24)).astype(np.int64)
    for shift in (0, 8, 16):
        counts = np.bincount(words >> shift & 255, minlength=256)
        chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum()
        assert abs(chi_square - 255) < 6.5 * (2 * 255) ** 0.5
    for lag in (1, 2, 3, 16, 64, 768, 4096):
        assert abs(correlation(r[lag:], r[:-lag])) < 6
    for other in (seed ^ 1, seed ^ 2**32, seed ^ 2**63):
        assert abs(correlation(r, uniform(N, other, stream, first))) < 6
    for following in (1, 2, 2**16, 2**31):
        assert abs(correlation(r, uniform(N, seed, (stream + following) % 2**32, first))) < 6
    assert abs(correlation(r, uniform(N, seed, stream, first + 2**32))) < 6


@every_isa
def test_no_read_past_the_end(isa: str) -> None:
    # The memory ends at a protected page. A read of it kills the process, hence a subprocess.
    code = f"""
import ctypes, mmap
from qsync_fx import _C
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 4 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for part in (1, 3):
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + part * page), page, 0) == 0
scale = (ctypes.c_float * 1)()
for size, dtype in ((4, "float32"), (2, "bfloat16"), (2, "float16")):
    for n in [*range(1, 140), page // 4 - 1]:
        for rounding in ("stochastic", "nearest", "floor"):
            source, target = start + page - n * size, start + 3 * page - n
            _C.quantize(source, target, ctypes.addressof(scale), 1, n, dtype, rounding, isa={isa!r})
            if size == 4:
                _C.round_float(source, start + 3 * page - n * size, n, 3, -6, 448.0, rounding, isa={isa!r})
print("intact")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "intact\n", f"exit {done.returncode}: {done.stderr[-500:]}"


def test_other_threads_run_meanwhile() -> None:
    x, q, scale = (
        torch.ones(2**25, dtype=torch.bfloat16),
        torch.empty(2**25, dtype=torch.int8),
        torch.empty(1),
    )
    stamps: list[float] = []
    done = threading.Event()

    def stamp() -> None:
        while not done.wait(0.001):
            stamps.append(time.perf_counter())

    def ran_in_the_middle() -> bool:
        start = time.perf_counter()
        _C.quantize(
            x.data_ptr(),
            q.data_ptr(),
            scale.data_ptr(),
            1,
            x.numel(),
            "bfloat16",
            "stochastic",
            isa="scalar",
        )
        length = time.perf_counter() - start
        return any(start + length / 4 < moment < start + length * 3 / 4 for moment in stamps)

    thread = threading.Thread(target=stamp)
    thread.start()
    try:
        # One attempt may fail on a busy machine; all fail if the call does not release the GIL.
        assert any(ran_in_the_middle() for _ in range(5))
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rounding": "up"}, "rounding up is not one of: stochastic, nearest, floor"),
        ({"dtype": "float64"}, "dtype float64 is not one of"),
        ({"isa": "neon"}, "isa neon is not one of"),
        ({"levels": 0}, "levels is 0"),
        ({"levels": 128}, "levels is 128"),
        ({"threads": 0}, "threads is 0"),
        ({"src": 0}, "null pointer"),
        ({"rows": 2**40, "columns": 2**40}, "does not fit"),
    ],
)
def test_wrong_arguments(changed: dict[str, object], message: str) -> None:
    x, q, scales = torch.ones(4), torch.empty(4, dtype=torch.int8), torch.empty(1)
    arguments: dict[str, object] = {
        "src": x.data_ptr(),
        "dst": q.data_ptr(),
        "scales": scales.data_ptr(),
        "rows": 1,
        "columns": 4,
    }
    arguments |= {"dtype": "float32", "rounding": "nearest"} | changed
    with pytest.raises(ValueError, match=message):
        _C.quantize(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("requested_isa", ["scalar", "", "quantum"])
def test_the_environment_chooses_the_path(requested_isa: str) -> None:
    code = "from qsync_fx import _C; print(_C.isa())"
    environment = os.environ | {"QSYNC_CPU_ISA": requested_isa}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    if requested_isa == "quantum":
        assert "OptionError: this build and this processor have no path 'quantum'" in done.stderr
        assert "QSYNC_CPU_ISA" in done.stderr
    else:
        assert done.stdout.strip() == (requested_isa or _C.available_isas()[0]), done.stderr
        assert not done.stderr
