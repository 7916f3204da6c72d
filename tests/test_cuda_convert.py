"""Copies and conversions of matrices equal torch's to the bit, without a GPU: the kernels' sources, compiled for the CPU.

Tiles, tails, zeros and alignments are those that nvcc compiles (see `cuda_on_cpu.h`). First the kernels by themselves, in memory that is
watched; then the wrapper and the operator, which are to reach them with any strides.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda import (
    ahead,
    calls,
    compiler,
    convert_source,
    converting,
    kernels,
    padding,
    reasons,
    toolchain,
)
from qsync_fx.backend.cuda.abi import ConvertArguments
from qsync_fx.backend.cuda.config import Arch
from qsync_fx.backend.cuda.convert_source import ELEMENTS, FLOATS, NUMBERS
from qsync_fx.backend.cuda.device import assumed
from qsync_fx.backend.cuda.keys import TEMPLATES
from qsync_fx.backend.cuda.library import Library, load
from qsync_fx.backend.cuda.problem import GemmProblem
from qsync_fx.backend.cuda.select import decide
from qsync_fx.backend.cuda.unit import Unit
from qsync_fx.backend.operators.convert import convert
from qsync_fx.errors import KernelError, PrecisionError, ToolchainError
from qsync_fx.precision import FORMATS

TESTS = Path(__file__).parent
SENTINEL = 0x55
DTYPES = {name: FORMATS[name].dtype for name in NUMBERS}
BITS = {"bits8": torch.int8, "bits16": torch.int16, "bits32": torch.int32}
PAIRS = [*((kind, kind) for kind in BITS), *((x, y) for x in NUMBERS for y in FLOATS)]
Compiled = Callable[[str], Library]


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compiles the library of a kind of elements with the host's compiler."""
    folder = tmp_path_factory.mktemp("convert")

    @functools.cache
    def compiled(kind: str) -> Library:
        unit = convert_source.copier("sm_80") if kind in BITS else convert_source.converter("sm_80", kind)
        return built(folder, unit)

    return compiled


def built(folder: Path, unit: Unit) -> Library:
    source, library = folder / f"{unit.name}.cpp", folder / f"{unit.name}.so"
    if not library.exists():
        source.write_text(unit.source)
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        # What a GPU refuses this processor does not: a vector that is not aligned to itself is to stop the test.
        flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        where = ["-include", str(TESTS / "cuda_on_cpu.h"), f"-I{TEMPLATES}", str(source), "-o", str(library)]
        done = subprocess.run(["g++", *flags, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return load(library, unit)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize])


def drawn(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns elements of all bit patterns, NaN, infinities and denormals among them; of floats half are of ordinary size."""
    dtype = BITS.get(kind) or DTYPES[kind]
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    found = raw.view(dtype).view(shape)
    if dtype.is_floating_point and dtype.itemsize > 1:
        usual = (torch.randn(shape, generator=generator) * 8).to(dtype)
        found = torch.where(torch.rand(shape, generator=generator) < 0.5, usual, found)
    return found


def expected(x: Tensor, kinds: tuple[str, str], scale: Tensor | None) -> Tensor:
    if kinds[0] in BITS:
        return x
    values = x.float() if scale is None else x.float() * scale
    return values.to(DTYPES[kinds[1]])


def assert_equal(found: Tensor, want: Tensor) -> None:
    """Asserts equal bits; of floats NaN is NaN."""
    same = bits(found) == bits(want)
    if want.is_floating_point():
        same |= found.float().isnan() & want.float().isnan()
    places = (~same).nonzero()[:3].tolist()
    assert not places, [(place, found[tuple(place)], want[tuple(place)]) for place in places]


def run(
    library: Library,
    x: Tensor,
    kinds: tuple[str, str],
    turned: bool,
    shape: tuple[int, int, int],
    scale: Tensor | None = None,
    offset: int = 0,
    multiprocessors: int = 3,
) -> Tensor:
    """Returns `y`, after a look at the memory around it. `x` is `[batches, rows, columns]`; `offset`: of `y`, from 64 bytes on."""
    dtype = BITS.get(kinds[1]) or DTYPES[kinds[1]]
    size = shape[0] * shape[1] * shape[2] * dtype.itemsize
    memory = torch.full((size + 256,), SENTINEL, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + 64 + offset
    arguments = ConvertArguments(
        x=x.data_ptr(), y=memory.data_ptr() + start, scale=calls.address(scale),
        batches=x.shape[0], rows=x.shape[1], columns=x.shape[2], ldx=x.stride(1), batch_stride=x.stride(0),
        y_batches=shape[0], y_rows=shape[1], y_columns=shape[2],
        x_type=ELEMENTS[kinds[0]], y_type=ELEMENTS[kinds[1]], turned=turned, multiprocessors=multiprocessors,
    )  # fmt: skip
    assert library.can_implement(arguments) is None and library.workspace(arguments) == 0
    library.run(arguments, 0, 0)
    assert (memory[:start] == SENTINEL).all() and (memory[start + size :] == SENTINEL).all(), (
        "it wrote beyond the result"
    )
    return memory[start : start + size].view(dtype).view(shape)


@st.composite
def sizes(draw: st.DrawFn, small: bool = False) -> int:
    return draw(
        st.one_of(st.integers(1, 40), st.sampled_from([16, 32, 64] if small else [64, 127, 128, 129, 144, 256, 300]))
    )


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@settings(max_examples=8)
@given(data=st.data())
def test_equals_torch(on_cpu: Compiled, kinds: tuple[str, str], data: st.DataObject) -> None:
    """Any sizes, gaps between rows and matrices, starts between multiples of 16 bytes, more room than values."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**62)))
    batches, rows, columns = data.draw(st.sampled_from([1, 1, 3])), data.draw(sizes()), data.draw(sizes())
    gap, lines, first = (data.draw(st.sampled_from(choices)) for choices in ([0, 0, 16, 1, 3], [0, 1], [0, 0, 16, 1]))
    turned = data.draw(st.booleans())
    between = (rows + lines) * (columns + gap) + data.draw(st.sampled_from([0, 0, 1]))
    memory = drawn(kinds[0], (batches * between + first + 16,), generator)
    strides = (between, columns + gap, 1)
    x = memory.as_strided((batches, rows, columns), strides, first)
    scaled = kinds[0] not in BITS and data.draw(st.booleans())
    scale = torch.tensor([data.draw(st.sampled_from([0.0123, 1.0, 3e-7, 1e30, 0.0, 2.0**-126]))]) if scaled else None
    inner = (columns, rows) if turned else (rows, columns)
    more = data.draw(st.sampled_from([(0, 0), (0, 0), (5, 0), (0, 1), (0, -1), (200, 300)]))
    up = -inner[1] % 16 if more[1] < 0 else more[1]
    shape = (batches + data.draw(st.sampled_from([0, 2])), inner[0] + more[0], inner[1] + up)
    width = (BITS.get(kinds[1]) or DTYPES[kinds[1]]).itemsize
    offset = width * data.draw(st.sampled_from([0, 0, 0, 1, 4]))
    y = run(on_cpu(kinds[0]), x, kinds, turned, shape, scale, offset, data.draw(st.sampled_from([0, 1, 16])))
    want = torch.zeros(shape, dtype=y.dtype)
    want[:batches, : inner[0], : inner[1]] = expected(x.mT if turned else x, kinds, scale)
    assert_equal(y, want)


@pytest.mark.parametrize("x", [name for name in NUMBERS if name != "fp32"])
@pytest.mark.parametrize("y", FLOATS)
def test_every_number_there_is(on_cpu: Compiled, x: str, y: str) -> None:
    """All bit patterns of up to 16 bits, with scales that make the results denormal, zero, huge and infinite."""
    dtype = DTYPES[x]
    codes = (
        torch.arange(256, dtype=torch.uint8) if dtype.itemsize == 1 else torch.arange(-(2**15), 2**15).to(torch.int16)
    )
    values = codes.view(dtype).view(1, 1, -1)
    for factor in (None, 1 / 3, 2.0**-24, 600.0, *((1e-40, 2.0**-14, 2.0**120) if dtype.itemsize == 1 else ())):
        scale = None if factor is None else torch.tensor([factor])
        found = run(on_cpu(x), values, (x, y), False, (1, 1, values.numel()), scale)
        assert_equal(found, expected(values, (x, y), scale))


@pytest.mark.parametrize("y", FLOATS)
def test_roundings_of_fp32(on_cpu: Compiled, y: str) -> None:
    """Ties, what lies beside them, the ends of the ranges, NaN."""
    grid = torch.arange(-(2**15), 2**15).to(torch.int16).view(DTYPES[y] if y != "fp32" else torch.bfloat16).float()
    middle = torch.cat([grid, (grid[:-1].double() + (grid[1:].double() - grid[:-1].double()) / 2).float()])
    beside = [middle, *(torch.nextafter(middle, torch.full_like(middle, end)) for end in (-torch.inf, torch.inf))]
    values = torch.cat(
        [*beside, torch.tensor([torch.inf, -torch.inf, torch.nan, 65504.0, 65519.99, 65520.0, 3.4e38, -0.0, 1e-45])]
    )
    found = run(on_cpu("fp32"), values.view(1, 1, -1), ("fp32", y), False, (1, 1, values.numel()))
    assert_equal(found, expected(values.view(1, 1, -1), ("fp32", y), None))


@pytest.mark.parametrize("turned", [False, True])
def test_what_is_empty_is_zeros(on_cpu: Compiled, turned: bool) -> None:
    for inner in ((0, 5), (5, 0), (0, 0)):
        x = torch.empty((1, *inner), dtype=torch.int8)
        assert run(on_cpu("bits8"), x, ("bits8", "bits8"), turned, (2, 40, 33)).eq(0).all()
        assert run(on_cpu("bits8"), x[:0], ("bits8", "bits8"), turned, (0, 40, 33)).numel() == 0


@pytest.mark.parametrize("turned", [0, 1])
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
def test_wrong_arguments(on_cpu: Compiled, turned: int, changed: dict[str, int], message: str) -> None:
    right = dict.fromkeys(("rows", "columns", "ldx", "y_rows", "y_columns"), 8) | dict.fromkeys(("x", "y"), 64)
    arguments = ConvertArguments(**right | {"batches": 1, "y_batches": 1, "turned": turned} | changed)
    library = on_cpu("bits8")
    assert str(library.can_implement(arguments)).startswith(message)
    with pytest.raises(KernelError, match=message):
        library.run(arguments, 0, 0)


@pytest.mark.parametrize("turned", [False, True])
def test_matrices_that_start_anywhere(on_cpu: Compiled, turned: bool) -> None:
    """Rows at multiples of 16 bytes, and the second matrix between them."""
    memory = torch.arange(2 * 33 * 64 + 16).to(torch.int8)
    x = memory[-memory.data_ptr() % 16 :].as_strided((2, 32, 64), (32 * 64 + 1, 64, 1))
    y = run(on_cpu("bits8"), x, ("bits8", "bits8"), turned, (2, 64, 32) if turned else (2, 32, 64))
    assert torch.equal(y, x.mT if turned else x)


def test_elements_that_are_not_aligned_to_themselves(on_cpu: Compiled) -> None:
    sizes_ = dict.fromkeys(("rows", "columns", "ldx", "y_rows", "y_columns"), 8) | {"batches": 1, "y_batches": 1}
    for changed in ({"x": 65}, {"y": 66}):
        arguments = ConvertArguments(**sizes_ | {"x": 64, "y": 64, "x_type": 2, "y_type": 2} | changed)
        assert "not aligned" in str(on_cpu("bits32").can_implement(arguments))


@pytest.mark.parametrize(("arch", "x", "y"), [("sm_90a", "bits8", "bits8"), ("sm_80", "int8", "bf16")])
def test_compiles_for_the_device(arch: Arch, x: str, y: str, tmp_path: Path) -> None:
    """No kernel spills or has a stack, which `compiler.build` refuses; more than 2^31 elements are taken."""
    try:
        toolchain.toolchain(arch)
    except ToolchainError as error:
        pytest.skip(error.what)
    unit = converting.unit_of(arch, (x, y))
    library = load(compiler.build([unit], progress=False, folder=tmp_path)[unit], unit)
    n, kinds = 100_000, {"x_type": ELEMENTS[x], "y_type": ELEMENTS[y]}
    square = dict.fromkeys(("rows", "columns", "ldx", "y_rows", "y_columns"), n) | {"batches": 1, "y_batches": 1}
    for turned in (0, 1):
        assert library.can_implement(ConvertArguments(x=64, y=64, turned=turned, **kinds, **square)) is None
    assert library.shared_memory() <= 48 << 10


# The wrapper: from tensors to matrices in memory.


def lying(t: Tensor, how: str) -> Tensor:
    match how:
        case "turned":
            return t.t().contiguous().t()
        case "sliced":
            return t.new_zeros(t.shape[0] + 1, t.shape[1] + 5)[1:, 5:].copy_(t)
        case "shifted":
            return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)
        case "sparse":
            return t.new_zeros(2 * t.shape[0], 3 * t.shape[1])[::2, ::3].copy_(t)
        case _:
            return t


@pytest.fixture
def by_kernel(on_cpu: Compiled, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Lets the wrapper find kernels for the CPU; reasons are forgotten."""
    reasons.forget()
    monkeypatch.setattr(
        kernels, "library", lambda unit, wait=True: on_cpu("bits8" if "copy" in unit.name else unit.name[14:])
    )
    return on_cpu


MATRICES = ["row", "turned", "sliced", "shifted"]
TYPES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_matrices_are_copied_as_torch_copies_them(by_kernel: Compiled, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    kind = next(name for name, found in DTYPES.items() if found == dtype)
    with assumed("sm_80", on="cpu"):
        for shape, how in [((m, n), how) for m, n in ((1, 1), (1, 40), (33, 1), (67, 130)) for how in MATRICES]:
            x = lying(drawn(kind, shape, generator), how)
            for way, more in (("row", 0), ("column", 0), ("row", 16), ("column", 3)):
                found = converting.laid_out(x, shape[0] + more, shape[1] + more, way)  # type: ignore[arg-type]
                want = padding.laid_out(x, shape[0] + more, shape[1] + more, way)  # type: ignore[arg-type]
                assert found.stride() == want.stride() and torch.equal(bits(found), bits(want))
    assert not reasons.reasons()


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 6), st.integers(1, 6)),
    st.sampled_from(["packed", "last", "sliced", "sliced last", "rows"]),
    st.integers(0, 20), st.integers(0, 2), st.sampled_from([torch.int8, torch.bfloat16]),
)  # fmt: skip
def test_images_are_copied_as_torch_copies_them(
    on_cpu: Compiled, shape: tuple[int, ...], how: str, channels: int, images: int, dtype: torch.dtype
) -> None:
    x = torch.randint(-128, 128, [size + 1 for size in shape]).to(dtype)
    x = x[1:, 1:] if how.startswith("sliced") else x
    x = (x.contiguous(memory_format=torch.channels_last) if how.endswith("last") else x)[: shape[0], : shape[1]]
    x = x[:, :, 1:] if how == "rows" else x if how.startswith("sliced") else x.clone()
    lines = converting.lines_of_images(x)
    want = padding.channels_last(x, x.shape[0] + images, x.shape[1] + channels)
    assert lines is not None
    n, c, h, w = want.shape
    kind = f"bits{8 * dtype.itemsize}"
    found = converting.run(on_cpu(kind), x, lines, (kind, kind), (n, h * w, c), dtype, None)
    assert torch.equal(found.view(n, h, w, c).permute(0, 3, 1, 2), want)


def test_what_lies_neither_way_is_torchs_to_copy(by_kernel: Compiled) -> None:
    with assumed("sm_80", on="cpu"):
        sparse = lying(torch.ones(8, 8, dtype=torch.int8), "sparse")
        assert converting.laid_out(sparse, 16, 8, "row").sum() == 64
        assert list(reasons.reasons().values()) == [converting.NEITHER]
        images = torch.ones(2, 3, 8, 8, dtype=torch.int8)[:, :, ::2, ::2]
        assert converting.lines_of_images(images) is None and converting.channels_last(images, 2, 4).sum() == 96
        wide = torch.ones(8, 8, dtype=torch.float64)
        assert torch.equal(converting.laid_out(wide, 8, 8, "column"), wide)
    assert "there is no kernel for these types" in reasons.reasons().values()
    with assumed("sm_70", on="cpu"):
        assert converting.laid_out(wide.half(), 8, 8, "column").sum() == 64
    assert "sm_70 has no kernel that copies" in reasons.reasons().values()
    reasons.forget()
    assert converting.laid_out(wide.float(), 9, 8, "row").sum() == 64
    assert list(reasons.reasons().values()) == ["cpu has no kernels"]


def test_a_kernel_that_fails_is_torchs_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(unit: Unit, wait: bool = True) -> Library | None:
        if wait:
            raise KernelError("it was not compiled", where=unit.name)
        return None

    reasons.forget()
    monkeypatch.setattr(kernels, "library", none)
    x = torch.ones(3, 5, dtype=torch.int8)
    with assumed("sm_80", on="cpu"):
        assert converting.laid_out(x, 3, 16, "row").sum() == 15
        assert reasons.reasons() == {"copy 3 x 5 int8": "it was not compiled"}
        monkeypatch.setattr(calls, "capturing", lambda device: True)
        assert converting.laid_out(x, 3, 16, "row").sum() == 15
    assert "CUDA graph" in reasons.reasons()["copy 3 x 5 int8"]


def test_what_models_need_is_compiled_ahead() -> None:
    large = GemmProblem(4096, 4096, 4095, "int8", "int8", "bf16", a_scale="tensor", b_scale="tensor")
    assert decide(large, "sm_90a").taken != large
    assert kernels.copier("sm_90a") in ahead.of_problems([large], "sm_90a", every_candidate=False)
    assert not ahead.of_problems([], "sm_90a", every_candidate=False)
    assert not kernels.copiers("sm_70") and not kernels.converters("sm_70")
    assert {kernels.copier("sm_80"), *(kernels.converter("sm_80", x) for x in NUMBERS)} <= set(ahead.of_all("sm_80"))


# The operator.


def wanted(x: Tensor, dtype: torch.dtype, scale: Tensor | None, turned: bool, shape: tuple[int, int]) -> Tensor:
    straight = x.t() if turned else x
    found = torch.zeros(shape).to(dtype)
    found[: straight.shape[0], : straight.shape[1]] = (
        (straight.float() * scale).to(dtype) if scale is not None else straight.to(dtype)
    )
    return found


CASES: list[dict[str, Any]] = [
    {},
    {"turned": True, "shape": (48, 16)},
    {"dtype": torch.bfloat16, "scale": torch.tensor(0.3)},
    {"dtype": torch.float16, "scale": torch.tensor([700.0]), "turned": True},
    {"dtype": torch.float32, "shape": (20, 50)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("source", TYPES, ids=str)
def test_the_operator_by_torch_and_by_a_kernel(
    by_kernel: Compiled, source: torch.dtype, case: dict[str, Any], on_cpu: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(2)
    kind = next(name for name, found in DTYPES.items() if found == source)
    for how in ("row", "turned"):
        x = lying(drawn(kind, (13, 41), generator), how)
        dtype, scale, turned = case.get("dtype", source), case.get("scale"), case.get("turned", False)
        shape = case.get("shape") or ((41, 13) if turned else (13, 41))
        want = wanted(x, dtype, scale, turned, shape)
        found = convert(x, **case)
        assert found.is_contiguous() and found.dtype == dtype and found.data_ptr() != x.data_ptr()
        assert_equal(found, want)
        with assumed("sm_80", on="cpu"):
            made = converting.convert(x, scale, dtype, turned, shape)
        assert made is not None
        assert_equal(made, want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_operator_is_one_to_torch(case: dict[str, Any]) -> None:
    x = torch.randint(-128, 128, (13, 41), dtype=torch.int8)
    arguments = (x, case.get("dtype", torch.int8), case.get("scale"), case.get("turned", False))
    shape = case.get("shape") or ((41, 13) if case.get("turned") else (13, 41))
    torch.library.opcheck(torch.ops.qsync.convert.default, (*arguments, list(shape)))


def test_errors_of_the_operator() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(PrecisionError, match="float64 is not converted"):
        convert(x.double())
    with pytest.raises(PrecisionError, match="cannot become"):
        convert(x, torch.int8)
    with pytest.raises(PrecisionError, match="with a scale"):
        convert(x.to(torch.int8), scale=torch.tensor(2.0))
    for wrong, message in (
        ({"shape": (3, 4)}, "do not fit"),
        ({"turned": True, "shape": (3, 5)}, "do not fit"),
        ({"shape": (3,)}, "dimensions"),
        ({"scale": torch.ones(3)}, "single FP32"),
        ({"scale": torch.ones((), dtype=torch.float64)}, "single FP32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            convert(x, **wrong)
    with pytest.raises(RuntimeError, match="dimensions"):
        convert(x[0], shape=(1, 5))
