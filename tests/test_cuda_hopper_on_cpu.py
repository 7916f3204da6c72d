"""Kernels for wgmma and TMA, run on the CPU: each element of the result, to the last bit.

Here one kernel; one of each kind with QSYNC_TEST_ALL_KERNELS=1, which takes some minutes. Compiling one takes 20 seconds.
"""

from __future__ import annotations

import os
from pathlib import Path

import cutlass_cpu
import hopper_cpu
import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.candidates_gemm import gemm_configs
from qsync_fx.backend.cuda.config import KernelConfig
from qsync_fx.backend.cuda.gemm_source import hopper
from qsync_fx.errors import ToolchainError

try:
    toolchain.toolchain()
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)


def kernels() -> list[KernelConfig]:
    """One kernel for each pair of operands, layouts, schedule and order; the first is of INT8."""
    found: dict[tuple[str, ...], KernelConfig] = {}
    for config in filter(hopper, gemm_configs("sm_90a")):
        kind = (config.a, config.b, config.a_major, config.b_major, config.schedule, config.order)
        if kind not in found or cutlass_cpu.bytes_a_tile(config) < cutlass_cpu.bytes_a_tile(found[kind]):
            found[kind] = config
    return sorted(found.values(), key=lambda config: config.a != "int8" or config.order != "stream_k")


KERNELS = kernels() if os.environ.get("QSYNC_TEST_ALL_KERNELS") else kernels()[:1]


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hopper_cpu.headers(tmp_path_factory.mktemp("headers"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", KERNELS, ids=lambda config: config.name)
def test_results_are_equal_to_the_last_bit(config: KernelConfig, headers: Path, tmp_path: Path) -> None:
    library = cutlass_cpu.library_of(config, hopper_cpu.compiled([config], tmp_path / "kernel", headers))
    cutlass_cpu.check(library, config)


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        (
            'asm volatile ("mbarrier.init.shared::cta.b64 [%0], %1;\\n" :: "r"(p), "r"(n));',
            "on_cpu::barrier_init((p), (n));",
        ),
        ('asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(f(x, ")")));', 'on_cpu::named_sync((id), (f(x, ")")));'),
        ('asm volatile("mov.u32 %0, %%clusterid.y;\\n" : "=r"(y) : );', "(y) = on_cpu::special.clusterid.y;"),
        ('asm("tcgen05.wait::ld.sync.aligned;" ::);', 'on_cpu::fail("tcgen05.wait::ld.sync.aligned;");'),
    ],
)
def test_a_statement_becomes_a_call(statement: str, call: str) -> None:
    assert hopper_cpu.replaced(statement) == call
