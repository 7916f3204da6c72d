"""Reference of the native kernels in numpy, and kernel calls with guarded memory."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from qsync_fx import _C

ROUNDINGS: tuple[_C.Rounding, ...] = ("stochastic", "nearest", "floor")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEEDS = st.integers(0, 2**64 - 1)
STREAMS = st.integers(0, 2**32 - 1)

_EDGE = 3  # guard elements around a result
_UNTOUCHED = 77


def mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def uniform(n: int, seed: int, stream: int, first: int = 0) -> NDArray[np.float32]:
    """Return the random numbers of elements first .. first + n - 1, in [0, 1)."""
    with np.errstate(over="ignore"):
        index = np.arange(n, dtype=np.uint64) + np.uint64(first)
        low, high = index.astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
        word = np.array([stream], np.uint32) + np.uint32(0x9E3779B9)
        key = mix(np.uint32(seed % 2**32) ^ mix(np.uint32(seed >> 32) ^ mix(word)))
        bits = mix(low * np.uint32(0x9E3779B1) + mix(key ^ high))
    return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def quantized(
    x: torch.Tensor, rounding: str, levels: int, seed: int, stream: int, first: int = 0
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return q, int8 [rows, columns], and scales, float32 [rows]."""
    values = x.float().numpy()
    r = uniform(values.size, seed, stream, first).reshape(values.shape)
    most = np.abs(values).max(1, initial=0)
    finite = np.isfinite(most)
    with np.errstate(invalid="ignore"):
        scales = np.maximum(most / np.float32(levels), np.float32(2.0**-126))
        scales = np.where(most == 0, np.float32(1), np.where(finite, scales, np.float32(np.nan)))
        u = np.where(finite[:, None], values / scales[:, None], np.float32(0))
    below = np.floor(u)
    up = {"stochastic": r < u - below, "nearest": np.rint(u) > below, "floor": False}[rounding]
    q = np.clip(below + up, -levels, levels).astype(np.int8)
    return q, scales


def run_quantize(
    x: torch.Tensor,
    rounding: _C.Rounding,
    levels: int = 127,
    seed: int = 0,
    stream: int = 0,
    threads: int = 1,
    first: int = 0,
    isa: str | None = None,
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return the kernel's (q, scales) of a contiguous matrix; fail if it writes out of bounds."""
    rows, columns = x.shape
    dtype = next(name for name, dtype in DTYPES.items() if dtype == x.dtype)
    q = np.full(x.numel() + 2 * _EDGE, _UNTOUCHED, np.int8)
    scales = np.full(rows + 2 * _EDGE, _UNTOUCHED, np.float32)
    q_address, scales_address = q.ctypes.data + _EDGE, scales.ctypes.data + 4 * _EDGE
    _C.quantize(
        x.data_ptr(),
        q_address,
        scales_address,
        rows,
        columns,
        dtype,
        rounding,
        levels,
        seed,
        stream,
        threads,
        first,
        isa,
    )
    for result in (q, scales):
        assert (result[:_EDGE] == _UNTOUCHED).all()
        assert (result[-_EDGE:] == _UNTOUCHED).all()
    return q[_EDGE:-_EDGE].reshape(rows, columns), scales[_EDGE:-_EDGE]


@st.composite
def vectors(
    draw: st.DrawFn, n: int, dtype: torch.dtype = torch.float32, finite: bool = False
) -> torch.Tensor:
    """Return n random values of one or many magnitudes, with zeros, denormals and large values.

    Unless `finite`, some are NaN or infinite. A random offset shifts the start in memory.
    """
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    limits = torch.finfo(dtype)
    smallest, largest = np.log2(limits.smallest_normal) - 20, np.log2(limits.max)
    low = draw(st.floats(smallest, largest))
    high = draw(st.sampled_from([low, largest, min(low + 8, largest)]))
    values = generator.uniform(-1, 1, n) * 2.0 ** generator.uniform(low, high, n)
    values[generator.random(n) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = 0.0
    special = [-0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 2] + (
        [] if finite else [np.nan, np.inf, -np.inf]
    )
    for value in draw(st.lists(st.sampled_from(special), max_size=2)) if n else ():
        values[generator.integers(n)] = value
    offset = draw(st.integers(0, 17))
    memory = torch.zeros(offset + n, dtype=dtype)
    memory[offset:] = torch.from_numpy(
        values.clip(limits.min, limits.max) if finite else values
    ).to(dtype)
    return memory[offset:]
