"""Kernels for wgmma and TMA, run on the CPU: each element of the result, to the last bit.

Here one kernel; one of each kind with QSYNC_TEST_ALL_KERNELS=1, which takes some minutes. Compiling one takes 20 seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import cuda_emulation as emulation
import cutlass_cpu
import hopper_cpu
import pytest
import torch

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.candidates_gemm import gemm_configs
from qsync_fx.backend.cuda.config import KernelConfig
from qsync_fx.backend.cuda.gemm_source import hopper
from qsync_fx.errors import ToolchainError
from qsync_fx.precision import FORMATS

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
    first: Callable[[KernelConfig], bool] = lambda c: c.a != "int8" or c.order != "stream_k"  # noqa: E731
    return sorted(found.values(), key=first)


KERNELS = kernels() if os.environ.get("QSYNC_TEST_ALL_KERNELS") else kernels()[:1]


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hopper_cpu.headers(tmp_path_factory.mktemp("headers"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", KERNELS, ids=lambda config: config.name)
def test_results_are_equal_to_the_last_bit(config: KernelConfig, headers: Path, tmp_path: Path) -> None:
    library = cutlass_cpu.library_of(config, hopper_cpu.compiled([config], tmp_path / "kernel", headers))
    generator = torch.Generator().manual_seed(int(config.digest, 16))
    for m, n, k in cutlass_cpu.sizes(config):
        a, b = cutlass_cpu.operands(config, m, n, k, generator)
        vectors = [torch.rand(size, generator=generator) / 32 + 0.01 for size in (m, n, n)]
        for each in (False, True):
            scales = (vector if each else vector[0].clone() for vector in vectors[:2])
            a_scale, b_scale = scales if config.a_scale != "none" else (None, None)
            bias = vectors[2] if each and config.bias else None
            split = 2 if each and config.order == "stream_k" else 1
            found = cutlass_cpu.run(library, config, a, b, a_scale, b_scale, bias, split)
            expected = emulation.gemm(a, b, a_scale, b_scale, bias, config.activation, FORMATS[config.out].dtype)
            if config.activation == "gelu":
                torch.testing.assert_close(found, expected)
            else:
                assert torch.equal(found, expected)


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
