"""Transposes of the native module are bit-equal to torch's, for any values and addresses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from qsync_fx import _C

SIZE = st.one_of(st.integers(0, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 130, 300]))


def turned(source: Tensor, threads: int) -> Tensor:
    """Return `[C, N, M]` of `[C, M, N]`, and check that the memory around it is unchanged."""
    count, rows, columns = source.shape
    memory = torch.full((source.numel() + 6,), 77, dtype=source.dtype)
    _C.turn(
        source.data_ptr(),
        memory[3:].data_ptr(),
        count,
        rows,
        columns,
        source.dtype.itemsize,
        threads,
    )
    assert (memory[:3] == 77).all() and (memory[source.numel() + 3 :] == 77).all()
    return memory[3 : source.numel() + 3].view(count, columns, rows)


@given(
    st.integers(0, 3),
    SIZE,
    SIZE,
    st.sampled_from([torch.int8, torch.int16, torch.int32]),
    st.integers(0, 5),
    st.integers(1, 3),
)
def test_bits_equal_the_transpose(
    count: int, rows: int, columns: int, dtype: torch.dtype, first: int, threads: int
) -> None:
    """Full and partial blocks; integers represent all bit patterns of floats of the same size."""
    limits = torch.iinfo(dtype)
    every = torch.randint(
        limits.min, limits.max + 1, (first + count * rows * columns,), dtype=dtype
    )
    source = every[first:].view(count, rows, columns)
    assert torch.equal(turned(source, threads), source.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_bits_are_preserved(dtype: torch.dtype) -> None:
    source = torch.tensor(
        [[[0.0, -0.0, float("nan")], [float("inf"), -float("inf"), 1e-40]]], dtype=dtype
    )
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    assert torch.equal(turned(source, 1).view(bits), source.mT.contiguous().view(bits))


def test_wrong_sizes_threads_and_null_pointers_raise() -> None:
    with pytest.raises(ValueError, match="null pointer"):
        _C.turn(0, 0, 1, 1, 1, 4)
    with pytest.raises(ValueError, match="bytes"):
        _C.turn(0, 0, 0, 0, 0, 3)
    with pytest.raises(ValueError, match="threads"):
        _C.turn(0, 0, 0, 0, 0, 4, 0)
    with pytest.raises(ValueError, match="fit into memory"):
        _C.turn(1, 1, 2**20, 2**20, 2**20, 4)
