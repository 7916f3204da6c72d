"""The CUDA quantizer, kernels and launches compiled for the CPU, compared bit for bit with the
reference.

tests/support/cuda/on_cpu/cuda_on_cpu.h runs every thread of a threadblock as a separate context, so
the tests run the code that nvcc compiles: tiles and tails, parts of the reduction, the workspace.
The tests on a GPU cover properties of the hardware, such as the rounding modes of its additions.
test_cuda_rounding.py tests single values.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda import codegen, toolchain
from qsync_fx.backend.cuda.kernel_build import library as abi, library as libraries
from qsync_fx.backend.cuda.kernel_build.library import QuantizeArguments
from qsync_fx.backend.numerics import philox, reference
from qsync_fx.errors import ToolchainError
from qsync_fx.formats import precision
from qsync_fx.rounding import ROUNDINGS, rounding_mode
from tests.support import tiers
from tests.support.cuda.compiled.small_units import build

TESTS = Path(__file__).parents[3]
SOURCES = TESTS.parent / "cpp" / "cutlass"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PAIRS = [("bf16", "int8"), ("fp32", "fp8"), ("fp16", "fp8_e5m2")]
KEEP: list[list[int]] = [[], [0], [1]]
SENTINEL = 0x55

Compiled = Callable[[str, str], ctypes.CDLL]

every_pair = pytest.mark.parametrize(
    ("x_type", "fmt"), PAIRS, ids=["-".join(pair) for pair in PAIRS]
)


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Return a function that compiles the unit of a pair with the host compiler."""
    folder = tmp_path_factory.mktemp("quantizer")

    @functools.cache
    def compiled(x_type: str, fmt: str) -> ctypes.CDLL:
        unit = codegen.quantizer("sm_80", x_type, fmt)
        source, library = folder / f"{unit.name}.cpp", folder / f"{unit.name}.so"
        source.write_text(unit.source)
        flags = [
            "-std=c++17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-shared",
            "-fPIC",
        ]
        where = [
            "-include",
            str(TESTS / "support" / "cuda" / "on_cpu" / "cuda_on_cpu.h"),
            f"-I{SOURCES}",
            str(source),
            "-o",
            str(library),
        ]
        done = subprocess.run(["g++", *flags, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        loaded = ctypes.CDLL(str(library))
        loaded.qsync_workspace.restype = ctypes.c_int64
        loaded.qsync_error.restype = loaded.qsync_name.restype = ctypes.c_char_p
        assert loaded.qsync_name() == unit.name.encode()
        assert loaded.qsync_abi() == abi.VERSION
        return loaded

    return compiled


@dataclass(frozen=True)
class Case:
    """Options of a quantizer call; `offset`: bytes by which outputs are off a multiple of 64."""

    fmt: str
    rounding: str
    group: int = 0
    transposed: bool = False
    seed: int = 0
    stream: int = 0
    offset: int = 0


def arguments(x: Tensor, case: Case, /, **changed: Any) -> QuantizeArguments:
    kind = next(name for name, dtype in DTYPES.items() if dtype == x.dtype)
    fields = {
        "x": x.data_ptr(),
        "rows": x.shape[0],
        "columns": x.shape[1],
        "ldx": x.stride(0),
        "stream": case.stream,
        "x_type": codegen.X_TYPES[kind],
        "format": codegen.QUANTIZER_FORMATS[case.fmt],
        "rounding": codegen.ROUNDINGS[case.rounding],
        "group": case.group,
        "multiprocessors": 3,
    }
    return QuantizeArguments(**fields | changed)


def run(
    library: ctypes.CDLL, x: Tensor, case: Case, **changed: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return q, its transpose and the scales; assert that the memory around them is unchanged."""
    (rows, columns), dtype = x.shape, precision(case.fmt).dtype
    sizes = x.numel(), x.numel() if case.transposed else 0, 4 * (1, rows, columns)[case.group]
    memories = [torch.full((size + 256,), SENTINEL, dtype=torch.uint8) for size in sizes]
    offsets = case.offset, case.offset, 0
    starts = [
        -memory.data_ptr() % 64 + 64 + offset
        for memory, offset in zip(memories, offsets, strict=True)
    ]
    q, qt, scale = (
        memory.data_ptr() + start for memory, start in zip(memories, starts, strict=True)
    )
    key = torch.tensor([case.seed])
    outputs = {"q": q, "qt": qt if case.transposed else 0, "scale": scale, "seed": key.data_ptr()}
    request = arguments(x, case, **outputs, **changed)
    assert library.qsync_can_implement(ctypes.byref(request)) == 0
    size = library.qsync_workspace(ctypes.byref(request))
    workspace = torch.full((size + 64,), SENTINEL, dtype=torch.uint8)
    status = library.qsync_run(ctypes.byref(request), ctypes.c_void_p(workspace.data_ptr()), None)
    assert status == 0, library.qsync_error(status)
    assert (workspace[size:] == SENTINEL).all()
    results = []
    for memory, start, length in zip(memories, starts, sizes, strict=True):
        assert (memory[:start] == SENTINEL).all()
        assert (memory[start + length :] == SENTINEL).all()
        results.append(memory[start : start + length].clone())
    transpose = results[1].view(dtype).view(columns, rows) if case.transposed else None
    return results[0].view(dtype).view(rows, columns), transpose, results[2].view(torch.float32)


def expected(x: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """Return the result of `reference.quantize` with its random numbers on CUDA devices."""
    row, mode = precision(case.fmt), rounding_mode(case.rounding)
    scale = reference.scales(x, row, KEEP[case.group])
    q = torch.empty(x.shape, dtype=row.dtype)
    random = (
        philox.uniform(q, torch.tensor(case.seed), case.stream) if mode == "stochastic" else None
    )
    value = reference.to_grid(x.float() / scale, row, mode, random)
    return q.copy_(torch.where(scale.isnan(), torch.zeros_like(value), value)), scale


def check(library: ctypes.CDLL, x: Tensor, case: Case, **changed: Any) -> None:
    q, qt, scale = run(library, x, case, **changed)
    wanted, scales = expected(x, case)
    torch.testing.assert_close(scale, scales.reshape(-1), rtol=0, atol=0, equal_nan=True)
    differences = (q.view(torch.uint8) != wanted.view(torch.uint8)).nonzero()[:3].tolist()
    assert not differences, [
        (row, column, float(x[row, column]), float(q[row, column])) for row, column in differences
    ]
    if qt is not None:
        assert torch.equal(qt.view(torch.uint8), q.t().contiguous().view(torch.uint8))


@st.composite
def matrices(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Draw a matrix of any shape and magnitude, with or without gaps between rows, zeros, NaN and
    Inf.
    """
    rows = draw(
        st.one_of(st.integers(1, 20), st.integers(1, 300), st.sampled_from([16, 128, 144, 256]))
    )
    columns = draw(
        st.one_of(
            st.integers(1, 40), st.integers(1, 300), st.sampled_from([8, 64, 128, 136, 256, 272])
        )
    )
    gap = draw(st.sampled_from([0, 0, 8, 1]))
    torch.manual_seed(draw(st.integers(0, 2**32)))
    exponent = draw(
        st.sampled_from(
            [0, 0, 4, -12, -120, -140, 120] if dtype != torch.float16 else [0, 0, 4, -12, -20]
        )
    )
    wide = torch.randn(rows, columns + gap, dtype=torch.float64) * torch.exp2(
        torch.randn(rows, 1) * draw(st.sampled_from([0.0, 3.0, 20.0]))
    )
    x = (wide * 2.0**exponent).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    special = draw(st.sampled_from(["none", "none", "zeros", "nan", "inf", "row", "largest"]))
    some = torch.rand(x.shape) < 0.01
    match special:
        case "zeros":
            x[torch.rand(x.shape) < 0.5] = draw(st.sampled_from([0.0, -0.0]))
        case "nan":
            x[some] = torch.nan
        case "inf":
            x[some] = -torch.inf
        case "row":
            x[int(torch.randint(rows, ()))] = 0.0
            x[:, int(torch.randint(columns, ()))] = 0.0
        case "largest":
            x[some] = torch.finfo(dtype).max
    return x[:, :columns]


@every_pair
@pytest.mark.parametrize("rounding", ROUNDINGS)
@settings(max_examples=10)
@given(data=st.data())
def test_equals_the_reference(
    on_cpu: Compiled, x_type: str, fmt: str, rounding: str, data: st.DataObject
) -> None:
    x = data.draw(matrices(DTYPES[x_type]))
    case = Case(
        fmt,
        rounding,
        data.draw(st.integers(0, 2)),
        data.draw(st.booleans()),
        data.draw(st.integers(-(2**63), 2**63 - 1)),
        data.draw(st.integers(0, 2**32 - 1)),
        data.draw(st.sampled_from([0, 0, 8, 1])),
    )
    check(on_cpu(x_type, fmt), x, case)


@pytest.mark.parametrize("group", [0, 1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_result_does_not_depend_on_the_device(
    on_cpu: Compiled, group: int, transposed: bool
) -> None:
    """Vary the number of multiprocessors, which decides the parts of the reduction and the tiles
    per threadblock.
    """
    library, x = on_cpu("bf16", "int8"), torch.randn(3, 4000 if group == 1 else 200).bfloat16()
    x = x if group == 1 else x.repeat(100, 1)
    case = Case("int8", "stochastic", group, transposed, 5, 6)
    sizes = set()
    for multiprocessors in (0, 1, 2, 16):
        check(library, x, case, multiprocessors=multiprocessors)
        request = arguments(x, case, q=64, scale=64, seed=64, multiprocessors=multiprocessors)
        sizes.add(library.qsync_workspace(ctypes.byref(request)))
    assert len(sizes) > 1, "the partition of the work depends on the number of multiprocessors"


@every_pair
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_no_elements(
    on_cpu: Compiled, x_type: str, fmt: str, shape: tuple[int, int], group: int
) -> None:
    x = torch.empty(shape, dtype=DTYPES[x_type])
    _, _, scale = run(on_cpu(x_type, fmt), x, Case(fmt, "nearest", group))
    assert scale.tolist() == [1.0] * (1, *shape)[group]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x_type": 0}, "a type, format"),
        ({"format": 1}, "a type, format"),
        ({"rounding": 3}, "a type, format"),
        ({"group": 3}, "a type, format"),
        ({"rows": -1}, "sizes or strides"),
        ({"ldx": 7}, "sizes or strides"),
        ({"rows": 2**31 - 1, "columns": 2**20, "ldx": 2**20}, "sizes or strides"),
        ({"x": 0}, "a pointer"),
        ({"x": 65}, "a pointer"),
        ({"q": 0}, "a pointer"),
        ({"scale": 0}, "a pointer"),
        ({"scale": 66}, "a pointer"),
        ({"rounding": 1, "seed": 0}, "a pointer"),
    ],
)
def test_wrong_arguments(on_cpu: Compiled, changed: dict[str, int], message: str) -> None:
    library, x = on_cpu("bf16", "int8"), torch.ones(8, 8, dtype=torch.bfloat16)
    request = arguments(x, Case("int8", "nearest"), **{"q": 64, "scale": 64, "seed": 64, **changed})
    for status in (
        library.qsync_can_implement(ctypes.byref(request)),
        library.qsync_run(ctypes.byref(request), None, None),
    ):
        assert library.qsync_error(status).decode().startswith(message)
    assert library.qsync_workspace(ctypes.byref(request)) == 0


def test_a_workspace_that_is_missing(on_cpu: Compiled) -> None:
    library, x, scale = (
        on_cpu("bf16", "int8"),
        torch.ones(8, 8, dtype=torch.bfloat16),
        torch.zeros(1),
    )
    request = arguments(x, Case("int8", "nearest"), q=64, scale=scale.data_ptr())
    assert library.qsync_run(ctypes.byref(request), None, None) != 0


@tiers.ALL
def test_compiles_for_the_device(tmp_path: Path) -> None:
    """Check that the library works without a device; `compiler.attempt` refuses kernels with spills
    or a stack.
    """
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(error.what)
    x_type, fmt = PAIRS[1]
    unit = codegen.quantizer("sm_90a", x_type, fmt)
    loaded = libraries.load(build([unit], progress=False, folder=tmp_path)[unit], unit)
    x, case = torch.ones(64, 64, dtype=DTYPES[x_type]), Case(fmt, "stochastic")
    request = arguments(x, case, q=64, scale=64, seed=64)
    assert loaded.can_implement(request) is None
    assert loaded.workspace(request) == 4 * 2
    assert (
        loaded.can_implement(arguments(x, case, q=64, scale=64))
        == "a pointer that is missing or not aligned to its elements"
    )
    assert 128 * 128 <= libraries.shared_memory(loaded.path) <= 48 << 10
