"""A sample of compiled kernels: each has its instruction and no register spills.

`make test-cuda-compile` compiles all kernels. For some architectures test_cuda_stand_in.py makes
the same checks on one kernel of each operation, so their samples are in the tier every. This also
applies to sm_86, because sm_89 has all of its kernels.
"""

from __future__ import annotations

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build import compiler
from qsync_fx.backend.cuda.kernel_config import ARCHITECTURES, Arch
from qsync_fx.errors import ToolchainError
from tests.support import tiers
from tests.support.cuda.compiled import cuda_compile_all

pytestmark = [tiers.ALL, pytest.mark.timeout(1800)]

COUNT = tiers.chosen([1], [2], [50])[0]
"""Number of kernels of each architecture; a kernel compiles in about ten seconds."""
ELSEWHERE = {"sm_75", "sm_80", "sm_86", "sm_90a"}


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=tiers.EVERY if arch in ELSEWHERE else ()) for arch in ARCHITECTURES],
)
def test_a_sample_of_kernels(arch: Arch) -> None:
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(error.what)
    if compiler.disassembler() is None:
        pytest.skip("nothing here can look for instructions")
    chosen = cuda_compile_all.sampled(cuda_compile_all.units(arch), COUNT)
    rows = cuda_compile_all.rows_of(chosen, each=False)
    assert [row["name"] for row in rows] == [unit.name for unit in chosen]
    assert not [row for row in rows if not row["ok"]]
