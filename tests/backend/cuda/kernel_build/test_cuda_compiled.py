"""A sample of all kernels, compiled: none spills, each has its instruction. `make
test-cuda-compile` compiles every one.

Of some architectures the stand-in for the runtime (test_cuda_stand_in) has one of each operation
compiled, and its checks are the same: a sample of those is in the tier every, and so is one of
sm_86, all of whose kernels sm_89 has, too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain, toolchain as nvrtc
from qsync_fx.backend.cuda.kernel_build import sass
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, Arch
from qsync_fx.errors import ToolchainError
from tests.support import tiers
from tests.support.cuda.compiled import cuda_compile_all, cuda_compile_twelve

pytestmark = [tiers.ALL, pytest.mark.timeout(1800)]

COUNT = tiers.chosen([1], [2], [50])[0]
"""Kernels of each architecture; ten seconds each, if there are few."""
ELSEWHERE = {"sm_75", "sm_80", "sm_86", "sm_90a"}
TWELVE = Path(__file__).parents[4] / ".cuda12"


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=tiers.EVERY if arch in ELSEWHERE else ()) for arch in ARCHITECTURES],
)
def test_a_sample_of_kernels(arch: Arch) -> None:
    try:
        toolchain.toolchain(arch)
    except ToolchainError as error:
        pytest.skip(error.what)
    if sass.disassembler() is None:
        pytest.skip("nothing here can look for instructions")
    chosen = cuda_compile_all.sampled(cuda_compile_all.units(arch), COUNT)
    rows = cuda_compile_all.rows_of(chosen, each=False)
    assert [row["name"] for row in rows] == [unit.name for unit in chosen]
    assert not [row for row in rows if not row["ok"]]


def test_a_sample_by_the_compiler_of_cuda_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pip has brought it, into the environment or by `make test-cuda-12`."""
    if TWELVE.is_dir() and "QSYNC_NVRTC" not in os.environ:
        monkeypatch.setenv("QSYNC_NVRTC", str(TWELVE))
    try:
        twelve, here = nvrtc.nvrtc(), toolchain.toolchain("sm_80")
    except ToolchainError as error:
        pytest.skip(error.what)
    if sass.disassembler() is None:
        pytest.skip("nothing here can look for instructions")
    count = tiers.chosen([1], [1], [6])[0]
    units = [
        unit
        for arch in cuda_compile_twelve.ARCHITECTURES
        for unit in cuda_compile_twelve.sample(arch, count)
    ]
    rows = [cuda_compile_twelve.row_of(unit, twelve, here.cutlass.folders) for unit in units]
    assert len(rows) == count * len(cuda_compile_twelve.ARCHITECTURES)
    assert not [row for row in rows if row["failed"]]
