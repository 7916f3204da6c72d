"""Copies and conversions of matrices, compiled for the CPU from the CUDA source, and their inputs.

See `cuda_on_cpu.h`. Invariant: a library is compiled once per process.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import CONVERT_TYPES, FLOATS, NUMBERS
from qsync_fx.backend.cuda.kernel_build.kernel_cache import TEMPLATES
from qsync_fx.backend.cuda.kernel_build.library import ConvertArguments, Library, load
from qsync_fx.formats import FORMATS

TESTS = Path(__file__).parent
SENTINEL = 0x55
DTYPES = {name: FORMATS[name].dtype for name in NUMBERS}
BITS = {"bits8": torch.int8, "bits16": torch.int16, "bits32": torch.int32}
PAIRS = [*((kind, kind) for kind in BITS), *((x, y) for x in NUMBERS for y in FLOATS)]


def library(kind: str) -> Library:
    """Return the library that copies or converts elements of a kind, built by the host compiler."""
    return _compiled("bits" if kind in BITS else kind)


@functools.cache
def _compiled(kind: str) -> Library:
    unit = codegen.copier("sm_80") if kind == "bits" else codegen.converter("sm_80", kind)
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
    # x86 allows unaligned vector accesses, a GPU does not: trap on them.
    flags += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    # A loaded library does not need its file.
    with tempfile.TemporaryDirectory() as folder:
        source, path = Path(folder) / f"{unit.name}.cpp", Path(folder) / f"{unit.name}.so"
        source.write_text(unit.source)
        where = [
            "-include",
            str(TESTS / "cuda_on_cpu.h"),
            f"-I{TEMPLATES}",
            str(source),
            "-o",
            str(path),
        ]
        done = subprocess.run(["g++", *flags, *where], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return load(path, unit)


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.itemsize])


def drawn(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return elements with random bit patterns, including NaN, infinities and denormals.

    Half of the FP32 and 16-bit floating-point values have ordinary magnitudes.
    """
    dtype = BITS.get(kind) or DTYPES[kind]
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    values = raw.view(dtype).view(shape)
    if dtype.is_floating_point and dtype.itemsize > 1:
        usual = (torch.randn(shape, generator=generator) * 8).to(dtype)
        values = torch.where(torch.rand(shape, generator=generator) < 0.5, usual, values)
    return values


def expected(x: Tensor, kinds: tuple[str, str], scale: Tensor | None) -> Tensor:
    if kinds[0] in BITS:
        return x
    values = x.float() if scale is None else x.float() * scale
    return values.to(DTYPES[kinds[1]])


def assert_equal(actual: Tensor, want: Tensor) -> None:
    """Assert equal bits; all NaN are equal."""
    same = bits(actual) == bits(want)
    if want.is_floating_point():
        same |= actual.float().isnan() & want.float().isnan()
    places = (~same).nonzero()[:3].tolist()
    assert not places, [(place, actual[tuple(place)], want[tuple(place)]) for place in places]


def run(
    x: Tensor,
    kinds: tuple[str, str],
    transposed: bool,
    shape: tuple[int, int, int],
    scale: Tensor | None = None,
    offset: int = 0,
    multiprocessors: int = 3,
) -> Tensor:
    """Return `y` and assert that the memory around it is unchanged.

    `x` is `[batches, rows, columns]`; `offset` is the distance of `y` from a multiple of 64 bytes.
    """
    dtype = BITS.get(kinds[1]) or DTYPES[kinds[1]]
    size = shape[0] * shape[1] * shape[2] * dtype.itemsize
    memory = torch.full((size + 256,), SENTINEL, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + 64 + offset
    arguments = ConvertArguments(
        x=x.data_ptr(), y=memory.data_ptr() + start,
        scale=None if scale is None else scale.data_ptr(),
        batches=x.shape[0], rows=x.shape[1], columns=x.shape[2], ldx=x.stride(1),
        batch_stride=x.stride(0),
        y_batches=shape[0], y_rows=shape[1], y_columns=shape[2],
        x_type=CONVERT_TYPES[kinds[0]], y_type=CONVERT_TYPES[kinds[1]], turned=transposed,
        multiprocessors=multiprocessors,
    )  # fmt: skip
    kernel = library(kinds[0])
    assert kernel.can_implement(arguments) is None and kernel.workspace(arguments) == 0
    kernel.run(arguments, 0, 0)
    assert (memory[:start] == SENTINEL).all() and (memory[start + size :] == SENTINEL).all(), (
        "the kernel wrote outside of the result"
    )
    return memory[start : start + size].view(dtype).view(shape)
