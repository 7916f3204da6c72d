"""Kernels for wgmma and TMA, run on the CPU: products and convolutions, each element of the result
to the last bit.

The tier all has one kernel of each kind: of products each width of operands, integers and floats,
each layout, schedule and order, and each convolution is met by one of them. The tier every has
each pair of formats with each layout, schedule and order. Compiling is what takes time.
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

# Whichever test is first compiles for all.
pytestmark = [tiers.ALL, pytest.mark.timeout(3600)]


def products() -> list[KernelConfig]:
    """One kernel for each pair of operands, layouts, schedule and order."""
    kinds = (
        ((c.a, c.b, c.a_major, c.b_major, c.schedule, c.order), c)
        for c in gemm_configs("sm_90a")
        if codegen.on_hopper(c)
    )
    return cutlass_cpu.smallest(kinds)


def convolutions() -> list[KernelConfig]:
    """One kernel for each product and its formats."""
    kinds = (((c.operation, c.a, c.out), c) for c in conv_configs("sm_90a") if codegen.on_hopper(c))
    return cutlass_cpu.smallest(kinds)


def kind(c: KernelConfig) -> object:
    """What of a format is in a kernel's text: how wide operands are, which decides tiles and
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
    """Of formats products have each kind: a convolution differs from them in how its operands are
    loaded.
    """
    return (("operation", c.operation),)


# A kernel compiles for 50 s.
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
