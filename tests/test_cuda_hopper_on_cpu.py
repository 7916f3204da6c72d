"""Kernels for wgmma and TMA, run on the CPU: products and convolutions, each element of the result to the last bit.

Here one of each; one of each kind with QSYNC_TEST_ALL_KERNELS=1, which takes some minutes. Compiling the first of a file takes 20 seconds,
each other one 8.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import cutlass_conv_cpu
import cutlass_cpu
import hopper_cpu
import pytest

from qsync_fx.backend.cuda import conv_source, gemm_source, toolchain
from qsync_fx.backend.cuda.candidates_conv import conv_configs
from qsync_fx.backend.cuda.candidates_gemm import gemm_configs
from qsync_fx.backend.cuda.config import KernelConfig
from qsync_fx.backend.cuda.library import Library
from qsync_fx.errors import ToolchainError

try:
    toolchain.toolchain()
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)


def products() -> list[KernelConfig]:
    """One kernel for each pair of operands, layouts, schedule and order; the first is of INT8."""
    kinds = (
        ((c.a, c.b, c.a_major, c.b_major, c.schedule, c.order), c)
        for c in gemm_configs("sm_90a")
        if gemm_source.hopper(c)
    )
    return sorted(smallest(kinds), key=lambda config: config.a != "int8" or config.order != "stream_k")


def convolutions() -> list[KernelConfig]:
    """One kernel for each product and its formats; the first is of INT8."""
    kinds = (((c.operation, c.a, c.out), c) for c in conv_configs("sm_90a") if conv_source.hopper(c))
    return sorted(smallest(kinds), key=lambda config: config.a != "int8")


def smallest(kinds: Iterable[tuple[tuple[str, ...], KernelConfig]]) -> list[KernelConfig]:
    """Returns the kernel of each kind that has the smallest tile."""
    found: dict[tuple[str, ...], KernelConfig] = {}
    for kind, config in kinds:
        found[kind] = min(found.get(kind, config), config, key=cutlass_cpu.bytes_a_tile)
    return list(found.values())


EVERY = bool(os.environ.get("QSYNC_TEST_ALL_KERNELS"))
PRODUCTS = products() if EVERY else products()[:1]
CONVOLUTIONS = convolutions() if EVERY else convolutions()[:1]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelConfig, Library]:
    parts = (hopper_cpu.build(kernels, tmp_path_factory.mktemp("on_cpu")) for kernels in (PRODUCTS, CONVOLUTIONS))
    return {config: library for part in parts for config, library in part.items()}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("config", [*PRODUCTS, *CONVOLUTIONS], ids=lambda config: config.name)
def test_results_are_equal_to_the_last_bit(libraries: dict[KernelConfig, Library], config: KernelConfig) -> None:
    (cutlass_cpu if config.operation == "gemm" else cutlass_conv_cpu).check(libraries[config], config)


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
