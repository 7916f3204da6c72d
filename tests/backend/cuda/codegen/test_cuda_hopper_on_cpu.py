"""Bit-exact tests of GEMM and convolution kernels for wgmma and TMA, run on the CPU.

The tier all has one GEMM kernel and one convolution kernel. The tier every has each pair of formats
with each layout, schedule and order. Compilation dominates the run time.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from qsync_fx.backend.cuda import codegen, toolchain
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig, size_of
from qsync_fx.backend.cuda.selection.candidates import conv_configs, gemm_configs
from qsync_fx.errors import ToolchainError
from tests.support import tiers
from tests.support.cuda.on_cpu import cutlass_conv_cpu, cutlass_cpu, hopper_cpu

try:
    toolchain.toolchain()
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)

# The first test compiles the kernels of all tests.
pytestmark = [tiers.ALL, pytest.mark.timeout(3600)]


def products() -> list[KernelConfig]:
    """Return one GEMM kernel for each pair of operands, layouts, schedule and order."""
    kinds = (
        ((c.a, c.b, c.a_major, c.b_major, c.schedule, c.order), c)
        for c in gemm_configs("sm_90a")
        if codegen.on_hopper(c)
    )
    return cutlass_cpu.smallest(kinds)


def convolutions() -> list[KernelConfig]:
    """Return one convolution kernel for each operation and its formats."""
    kinds = (((c.operation, c.a, c.out), c) for c in conv_configs("sm_90a") if codegen.on_hopper(c))
    return cutlass_cpu.smallest(kinds)


def kind(c: KernelConfig) -> object:
    """Return the format properties in a kernel's source: the operand width, which decides tiles and
    swizzles, and whether sums are integers.
    """
    return size_of(c.a), c.a == "int8"


def facts_of_a_product(c: KernelConfig) -> Iterable[object]:
    return (
        ("kind", kind(c)),
        ("layout", c.a_major, c.b_major),
        ("schedule", c.schedule),
        ("order", c.order),
    )


def facts_of_a_convolution(c: KernelConfig) -> Iterable[object]:
    """Return only the operation: GEMM kernels cover the kinds of formats, and convolutions differ
    from them only in how operands are loaded.
    """
    return (("operation", c.operation),)


# A kernel compiles in 50 s.
PRODUCTS = tiers.chosen([], cutlass_cpu.covering(products(), facts_of_a_product)[:1], products())
CONVOLUTIONS = tiers.chosen(
    [], cutlass_cpu.covering(convolutions(), facts_of_a_convolution)[:1], convolutions()
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelConfig, Library]:
    parts = (
        hopper_cpu.build(kernels, tmp_path_factory.mktemp("on_cpu"))
        for kernels in (PRODUCTS, CONVOLUTIONS)
    )
    return {config: library for part in parts for config, library in part.items()}


@pytest.mark.parametrize("config", [*PRODUCTS, *CONVOLUTIONS], ids=lambda config: config.name)
def test_results_are_equal_to_the_last_bit(
    libraries: dict[KernelConfig, Library], config: KernelConfig
) -> None:
    (cutlass_cpu if config.operation == "gemm" else cutlass_conv_cpu).check(
        libraries[config], config
    )
