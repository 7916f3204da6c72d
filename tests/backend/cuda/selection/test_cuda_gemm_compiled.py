"""Source of GEMM kernels, and host code of compiled ones: rejected arguments and required memory.

One kernel of each CUTLASS generation is compiled, into the user's cache, which it shares with
test_cuda_stand_in.py. The build is itself a test: it refuses kernels that spill, use a stack,
serialize wgmma or lack their instruction. tests/support/cuda/compiled/cuda_compile_all.py compiles
all kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from pathlib import Path

import pytest
from test_cuda_gemm import AMPERE, HOPPER, INT8, STREAM_K, kernels

from qsync_fx.backend.cuda import codegen, kernel_config, toolchain
from qsync_fx.backend.cuda.kernel_build import library
from qsync_fx.backend.cuda.kernel_build.library import GemmArguments
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig
from qsync_fx.errors import ToolchainError
from tests.support import tiers
from tests.support.cuda.compiled import cuda_batches
from tests.support.cuda.compiled.small_units import build

FIELDS = {
    "tile": (256, 128, 64),
    "warp": (32, 64, 64),
    "stages": 5,
    "order": "stream_k",
    "swizzle": 8,
    "bias": False,
    "out": "fp16",
    "out_alignment": 4,
    "arch": "sm_86",
}


@pytest.mark.parametrize("name", FIELDS)
def test_each_attribute_is_in_the_source(name: str) -> None:
    """Compare sources without the kernel's name; the architecture changes only the name."""
    changed = dataclasses.replace(AMPERE, **{name: FIELDS[name]})  # type: ignore[arg-type]
    before, after = (codegen.gemm_source(config) for config in (AMPERE, changed))
    assert before == codegen.gemm_source(dataclasses.replace(AMPERE))
    assert (after.source.replace(changed.name, AMPERE.name) != before.source) != (name == "arch")
    assert after.name != before.name


GOLDEN = """\
#include "gemm/gemm_sm90.cuh"

struct Config {
    using A = std::int8_t;
    using B = std::int8_t;
    using Accumulator = std::int32_t;
    using Output = cutlass::bfloat16_t;
    using LayoutA = cutlass::layout::RowMajor;
    using LayoutB = cutlass::layout::ColumnMajor;
    using Tile = cute::Shape<cute::_128, cute::_256, cute::_128>;
    using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
    using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
    using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
    using Scheduler = cutlass::gemm::PersistentScheduler;
    static constexpr int alignment = 16;
    static constexpr int out_alignment = 8;
    static constexpr int stages = 0;
    static constexpr bool scaled = true;
    static constexpr bool biased = true;
    static constexpr int swizzle = 4;
    static constexpr int largest_k = 131071;
    static constexpr bool stream_k = false;
};

QSYNC_GEMM(Config, "NAME")
"""


def test_the_source_of_the_first_kernel_for_hopper() -> None:
    unit = codegen.gemm_source(HOPPER)
    assert unit.source == GOLDEN.replace("NAME", HOPPER.name)
    assert (unit.opcode, unit.heavy, unit.interface, unit.arch) == ("IGMMA", True, "gemm", "sm_90a")


try:
    TOOLS = toolchain.toolchain()
    NO_TOOLS = ""
except ToolchainError as error:
    NO_TOOLS = str(error)

compiles = pytest.mark.skipif(bool(NO_TOOLS), reason=NO_TOOLS.replace("\n", " "))


@compiles
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a"])
def test_nvcc_accepts_the_batch_command(arch: Arch, tmp_path: Path) -> None:
    """Check that the command requests machine code of one architecture: nvcc rejects batches with
    PTX, and each kernel was then compiled separately.
    """
    source = tmp_path / "batch.cu"
    source.write_text("__global__ void nothing() {}\n")
    words = cuda_batches.command(
        codegen.gemm_source(kernels(INT8, arch)[0]), source, tmp_path / "batch.o"
    )
    done = subprocess.run(
        [words[0], "--dryrun", *words[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


@functools.cache
def compiled(config: KernelConfig) -> library.Library:
    """Compile a kernel, once.

    `build` refuses kernels that spill, use a stack, serialize wgmma or lack their instruction.
    """
    unit = codegen.gemm_source(config)
    return library.load(build([unit], progress=False)[unit], unit)


def arguments(m: int = 512, n: int = 256, k: int = 1024, **changes: int) -> GemmArguments:
    """Return arguments with dummy pointers, which are not dereferenced."""
    fields = {
        "a": 4096,
        "b": 8192,
        "d": 16384,
        "lda": k,
        "ldb": k,
        "ldd": n,
        "m": m,
        "n": n,
        "k": k,
    }
    return GemmArguments(**(fields | {"multiprocessors": 108} | changes))


EACH = pytest.mark.parametrize("config", [STREAM_K, HOPPER], ids=["2.x", "3.x"])


@tiers.ALL
@compiles
@EACH
@pytest.mark.timeout(900)
def test_host_code_rejects_unsupported_arguments(config: KernelConfig) -> None:
    """Check stream-K with scales per row, which needs the most registers, and wgmma."""
    loaded = compiled(config)
    supported = (
        arguments(),
        arguments(a_scale=64, b_scale=64, bias=64),
        arguments(a_scale=4, a_scale_per_row=1, b_scale=4, b_scale_per_column=1),
        arguments(m=1),
        arguments(m=511),
        arguments(lda=2048, ldb=4096, ldd=264),
        arguments(m=1, n=8, k=16),
    )
    assert [loaded.can_implement(each) for each in supported] == [None] * len(supported)
    misaligned = (
        arguments(a=4104),
        arguments(b=8193),
        arguments(d=16392),
        arguments(lda=1032),
        arguments(ldb=1025),
        arguments(ldd=260),
        arguments(k=1000, lda=1024, ldb=1024),
        arguments(n=252, ldd=256),
        arguments(bias=66),
        arguments(a_scale=65),
    )
    assert {loaded.can_implement(each) for each in misaligned} == {"Error Misaligned Operand"}
    impossible = (
        arguments(a=0),
        arguments(d=0),
        arguments(m=0),
        arguments(n=-8),
        arguments(lda=512),
        arguments(ldd=248),
        arguments(k=1 << 17),
        arguments(a_scale_per_row=1),
        arguments(b_scale_per_column=1),
        arguments(split=-1),
    )
    assert {loaded.can_implement(each) for each in impossible} == {"Error Invalid Problem"}


@tiers.ALL
@compiles
@EACH
@pytest.mark.timeout(900)
def test_workspace_and_shared_memory(config: KernelConfig) -> None:
    """Check the workspace of stream-K, which stores partial sums of shared tiles: 64 KB each at
    128 x 128, at most two per multiprocessor.
    """
    loaded = compiled(config)
    if config == STREAM_K:
        sizes = [
            loaded.workspace(arguments(4096, 4096, 4096, multiprocessors=count))
            for count in (66, 108)
        ]
        assert 0 < sizes[0] < sizes[1] <= 2 * 4 * 128 * 128 * 108 + (1 << 16)
        assert loaded.can_implement(arguments(split=4)) is None
    else:
        assert loaded.workspace(arguments()) == 0
        assert loaded.can_implement(arguments(split=2)) == "Error Invalid Problem"
    m, n, k = config.tile
    assert (
        (m + n) * k * max(config.stages, 2)
        <= library.shared_memory(loaded.path)
        <= kernel_config.SHARED_MEMORY[config.arch]
    )
