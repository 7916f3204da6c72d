"""Matrix products of the native module with guarded results and operands in many layouts."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from qsync_fx import _C

DTYPES: dict[torch.dtype, Literal["float32", "bfloat16", "int32"]] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
}
OPERANDS: dict[torch.dtype, _C.Operands] = {torch.int8: "int8", torch.bfloat16: "bfloat16"}

LAYOUTS = st.sampled_from(
    ["rows", "columns", "rows within", "columns within", "every second", "one row", "one column"]
)
SIZES = st.one_of(
    st.integers(0, 3), st.sampled_from([12, 16, 31, 32, 33, 64, 65]), st.integers(4, 90)
)
LENGTHS = st.one_of(st.integers(0, 9), st.integers(10, 200))


def multiplied(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype = torch.int32,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
    threads: int = 1,
    isa: str | None = None,
    activation: _C.Activation = "none",
) -> Tensor:
    m, n = a.shape[0], b.shape[1]
    # The memory around the result must not change.
    memory = torch.full((m * n + 32,), 77, dtype=dtype)
    result = memory[16 : 16 + m * n].view(m, n)
    of_a, of_b, added = (0 if t is None else t.data_ptr() for t in (a_scale, b_scale, bias))
    _C.gemm(
        *(
            a.data_ptr(),
            b.data_ptr(),
            result.data_ptr(),
            m,
            n,
            a.shape[1],
            a.stride(),
            b.stride(),
            DTYPES[dtype],
        ),
        a_scale=of_a,
        a_scale_each=a_scale is not None and a_scale.dim() > 0,
        b_scale=of_b,
        b_scale_each=b_scale is not None and b_scale.dim() > 0,
        bias=added,
        threads=threads,
        isa=isa,
        operands=OPERANDS[a.dtype],
        activation=activation,
    )
    assert (memory[:16] == 77).all() and (memory[16 + m * n :] == 77).all()
    return result


def matrix(
    rows: int, columns: int, layout: str, dtype: torch.dtype = torch.int8, lowest: int = -128
) -> Tensor:
    """Return random integers from `lowest` to `-lowest - 1`."""

    def numbers(*shape: int) -> Tensor:
        return torch.randint(lowest, -lowest, shape).to(dtype)

    match layout:
        case "rows":
            return numbers(rows, columns)
        case "columns":
            return numbers(columns, rows).t()
        case "rows within":
            return numbers(rows + 3, columns + 5)[2 : rows + 2, 3 : columns + 3]
        case "columns within":
            return numbers(columns + 3, rows + 5).t()[1 : rows + 1, 2 : columns + 2]
        case "every second":
            return numbers(2 * rows, 2 * columns)[::2, ::2]
        case "one row":
            return numbers(1, columns).expand(rows, columns)
        case _:
            return numbers(rows, 1).expand(rows, columns)


def moved(t: Tensor, places: int) -> Tensor:
    """Return a copy with equal strides at an offset of `places` values in its allocation."""
    memory = torch.empty(t.numel() + places, dtype=t.dtype)
    return memory[places:].as_strided(t.shape, t.stride()).copy_(t)


@contextlib.contextmanager
def matrices_at_the_end_of_memory(dtype: torch.dtype) -> Iterator[Iterator[Tensor]]:
    """Yield random integer matrices, row- and column-major, at the end of a readable page."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    pages = torch.frombuffer(memory, dtype=dtype)
    end = page // dtype.itemsize
    behind = ctypes.c_void_p(pages.data_ptr() + page)
    libc = ctypes.CDLL(None, use_errno=True)

    def matrices() -> Iterator[Tensor]:
        for rows, columns in [(12, 64), (7, 33), (13, 5), (32, 16), (1, 17), (17, 1)]:
            values = pages[end - rows * columns : end].copy_(
                torch.randint(-128, 128, (rows * columns,))
            )
            yield from (values.view(rows, columns), values.view(columns, rows).t())

    assert libc.mprotect(behind, ctypes.c_size_t(page), 0) == 0
    try:
        yield matrices()
    finally:
        libc.mprotect(behind, ctypes.c_size_t(page), 3)
