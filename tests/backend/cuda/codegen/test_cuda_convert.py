"""Matrix copy and conversion kernels, compiled for the CPU, compared bit for bit with torch.

The code for tiles, tails, zero padding and alignment is the code that nvcc compiles. The tests
also check the memory around results. test_matrix_copies.py tests the calls from tensors.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.codegen import CONVERT_TYPES, FLOATS, NUMBERS
from qsync_fx.backend.cuda.kernel_build.library import ConvertArguments, load, shared_memory
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.runtime import layout_convert
from qsync_fx.errors import KernelError, ToolchainError
from tests.support.cuda.compiled.small_units import build
from tests.support.cuda.on_cpu.convert_on_cpu import (
    BITS,
    DTYPES,
    PAIRS,
    assert_equal,
    drawn,
    expected,
    library,
    run,
)


@st.composite
def sizes(draw: st.DrawFn, small: bool = False) -> int:
    return draw(
        st.one_of(
            st.integers(1, 40),
            st.sampled_from([16, 32, 64] if small else [64, 127, 128, 129, 144, 256, 300]),
        )
    )


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@settings(max_examples=6)
@given(data=st.data())
def test_equals_torch(kinds: tuple[str, str], data: st.DataObject) -> None:
    """Vary sizes, gaps between rows and matrices, start alignment and output padding."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**62)))
    batches, rows, columns = (
        data.draw(st.sampled_from([1, 1, 3])),
        data.draw(sizes()),
        data.draw(sizes()),
    )
    gap, lines, first = (
        data.draw(st.sampled_from(choices)) for choices in ([0, 0, 16, 1, 3], [0, 1], [0, 0, 16, 1])
    )
    transposed = data.draw(st.booleans())
    between = (rows + lines) * (columns + gap) + data.draw(st.sampled_from([0, 0, 1]))
    memory = drawn(kinds[0], (batches * between + first + 16,), generator)
    strides = (between, columns + gap, 1)
    x = memory.as_strided((batches, rows, columns), strides, first)
    scaled = kinds[0] not in BITS and data.draw(st.booleans())
    scale = (
        torch.tensor([data.draw(st.sampled_from([0.0123, 1.0, 3e-7, 1e30, 0.0, 2.0**-126]))])
        if scaled
        else None
    )
    inner = (columns, rows) if transposed else (rows, columns)
    more = data.draw(st.sampled_from([(0, 0), (0, 0), (5, 0), (0, 1), (0, -1), (200, 300)]))
    up = -inner[1] % 16 if more[1] < 0 else more[1]
    shape = (batches + data.draw(st.sampled_from([0, 2])), inner[0] + more[0], inner[1] + up)
    width = (BITS.get(kinds[1]) or DTYPES[kinds[1]]).itemsize
    offset = width * data.draw(st.sampled_from([0, 0, 0, 1, 4]))
    y = run(x, kinds, transposed, shape, scale, offset, data.draw(st.sampled_from([0, 1, 16])))
    want = torch.zeros(shape, dtype=y.dtype)
    want[:batches, : inner[0], : inner[1]] = expected(x.mT if transposed else x, kinds, scale)
    assert_equal(y, want)


@pytest.mark.parametrize("x", [name for name in NUMBERS if name != "fp32"])
@pytest.mark.parametrize("y", FLOATS)
def test_conversion_of_every_value(x: str, y: str) -> None:
    """Convert all bit patterns of up to 16 bits; scales make results denormal, zero, huge or
    infinite.
    """
    dtype = DTYPES[x]
    codes = (
        torch.arange(256, dtype=torch.uint8)
        if dtype.itemsize == 1
        else torch.arange(-(2**15), 2**15).to(torch.int16)
    )
    values = codes.view(dtype).view(1, 1, -1)
    for factor in (
        None,
        1 / 3,
        2.0**-24,
        600.0,
        *((1e-40, 2.0**-14, 2.0**120) if dtype.itemsize == 1 else ()),
    ):
        scale = None if factor is None else torch.tensor([factor])
        result = run(values, (x, y), False, (1, 1, values.numel()), scale)
        assert_equal(result, expected(values, (x, y), scale))


@pytest.mark.parametrize("y", FLOATS)
def test_roundings_of_fp32(y: str) -> None:
    """Convert ties, their neighbours, the limits of the ranges, and NaN."""
    grid = (
        torch.arange(-(2**15), 2**15)
        .to(torch.int16)
        .view(DTYPES[y] if y != "fp32" else torch.bfloat16)
        .float()
    )
    middle = torch.cat(
        [grid, (grid[:-1].double() + (grid[1:].double() - grid[:-1].double()) / 2).float()]
    )
    neighbours = [
        middle,
        *(torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf)),
    ]
    values = torch.cat(
        [
            *neighbours,
            torch.tensor(
                [torch.inf, -torch.inf, torch.nan, 65504.0, 65519.99, 65520.0, 3.4e38, -0.0, 1e-45]
            ),
        ]
    )
    result = run(values.view(1, 1, -1), ("fp32", y), False, (1, 1, values.numel()))
    assert_equal(result, expected(values.view(1, 1, -1), ("fp32", y), None))


@pytest.mark.parametrize("transposed", [False, True])
def test_padding_is_zero(transposed: bool) -> None:
    for inner in ((0, 5), (5, 0), (0, 0)):
        x = torch.empty((1, *inner), dtype=torch.int8)
        assert run(x, ("bits8", "bits8"), transposed, (2, 40, 33)).eq(0).all()
        assert run(x[:0], ("bits8", "bits8"), transposed, (0, 40, 33)).numel() == 0


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_type": 3}, "a type"),
        ({"y_type": 1}, "a type"),
        ({"rows": -1}, "sizes or strides"),
        ({"rows": 9}, "sizes or strides"),
        ({"batches": 2}, "sizes or strides"),
        ({"ldx": 7}, "sizes or strides"),
        ({"y_rows": 2**40, "y_columns": 2**40}, "sizes or strides"),
        ({"y_batches": 2**62}, "sizes or strides"),
        ({"x": 0}, "a pointer"),
        ({"y": 0}, "a pointer"),
        ({"scale": 66}, "a pointer"),
    ],
)
def test_wrong_arguments(transposed: int, changed: dict[str, int], message: str) -> None:
    right = dict.fromkeys(("rows", "columns", "ldx", "y_rows", "y_columns"), 8) | dict.fromkeys(
        ("x", "y"), 64
    )
    arguments = ConvertArguments(
        **right | {"batches": 1, "y_batches": 1, "turned": transposed} | changed
    )
    kernel = library("bits8")
    assert str(kernel.can_implement(arguments)).startswith(message)
    with pytest.raises(KernelError, match=message):
        kernel.run(arguments, 0, 0)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_that_start_anywhere(transposed: bool) -> None:
    """Use rows at multiples of 16 bytes in the first matrix and unaligned rows in the second."""
    memory = torch.arange(2 * 33 * 64 + 16).to(torch.int8)
    x = memory[-memory.data_ptr() % 16 :].as_strided((2, 32, 64), (32 * 64 + 1, 64, 1))
    y = run(x, ("bits8", "bits8"), transposed, (2, 64, 32) if transposed else (2, 32, 64))
    assert torch.equal(y, x.mT if transposed else x)


def test_elements_that_are_not_aligned_to_themselves() -> None:
    sizes_ = dict.fromkeys(("rows", "columns", "ldx", "y_rows", "y_columns"), 8) | {
        "batches": 1,
        "y_batches": 1,
    }
    for changed in ({"x": 65}, {"y": 66}):
        arguments = ConvertArguments(
            **sizes_ | {"x": 64, "y": 64, "x_type": 2, "y_type": 2} | changed
        )
        assert "not aligned" in str(library("bits32").can_implement(arguments))


@pytest.mark.parametrize(
    ("arch", "x", "y"), [("sm_90a", "bits8", "bits8"), ("sm_80", "int8", "bf16")]
)
def test_compiles_for_the_device(arch: Arch, x: str, y: str, tmp_path: Path) -> None:
    """Check that kernels use no spills and no stack, and accept more than 2^31 elements."""
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(error.what)
    unit = layout_convert.unit_of(arch, (x, y))
    loaded = load(build([unit], progress=False, folder=tmp_path)[unit], unit)
    n, kinds = 100_000, {"x_type": CONVERT_TYPES[x], "y_type": CONVERT_TYPES[y]}
    square = dict.fromkeys(("rows", "columns", "ldx", "y_rows", "y_columns"), n) | {
        "batches": 1,
        "y_batches": 1,
    }
    for transposed in (0, 1):
        assert (
            loaded.can_implement(ConvertArguments(x=64, y=64, turned=transposed, **kinds, **square))
            is None
        )
    assert shared_memory(loaded.path) <= 48 << 10
