"""Bit-exact tests of CUTLASS 2.x convolution kernels, run on the CPU: outputs and gradients.

See cutlass_cpu.py. Compilation dominates the run time: the tier all covers each operation with each
kind of operands, each output format and each order; the tier every covers all 2.x kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig, size_of
from qsync_fx.backend.cuda.selection.candidates import conv_configs
from qsync_fx.errors import ToolchainError
from tests.gpu import test_conv
from tests.support import tiers
from tests.support.cuda.on_cpu import cutlass_conv_cpu, cutlass_cpu

try:
    toolchain.toolchain()
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)

# The first test compiles the kernels of all tests. The fast tier tests only GEMM kernels, which use
# the same templates.
pytestmark = [pytest.mark.timeout(7200), tiers.ALL]

CHANGED = {
    # Kernel launches, which a host compiler cannot parse.
    "cutlass/conv/device/implicit_gemm_convolution.h": (r"<<<.*?>>>", ""),
    # Enable the disabled C++ equivalent of PTX code.
    "cutlass/conv/threadblock/conv2d_dgrad_filter_tile_access_iterator_optimized.h": (
        r"#if 0",
        "#if 1",
    ),
    "cutlass/conv/threadblock/conv2d_dgrad_output_gradient_tile_access_iterator_optimized.h": (
        r"#if 0",
        "#if 1",
    ),
}
"""Changes to CUTLASS headers: path to pattern and replacement."""


def all_kernels() -> list[KernelConfig]:
    """Return the 2.x kernels for sm_75 and sm_80; kernels of later targets have the same source."""
    kernels = [config for arch in ("sm_75", "sm_80") for config in conv_configs(arch)]  # type: ignore[arg-type]
    return list(dict.fromkeys(kernels))


def of_each_kind() -> list[KernelConfig]:
    """Return the smallest kernel for each target, operation, pair of formats and order."""
    return cutlass_cpu.smallest(
        ((c.operation, c.arch, c.a, c.out, c.strided, c.order), c) for c in all_kernels()
    )


def facts(c: KernelConfig) -> Iterable[object]:
    """Return the properties that the sample must cover.

    Kernels for formats of equal width on the same units differ only in the instruction, which the
    GEMM tests cover.
    """
    kind = size_of(c.a), c.unit, c.a == "int8"
    return (
        (c.operation, kind),
        ("out", c.out),
        (c.operation, c.strided, c.order),
        (c.operation, c.arch),
    )


def one_of_each() -> list[KernelConfig]:
    """Return the smallest kernel for each predicate."""
    wanted: tuple[Callable[[KernelConfig], bool], ...] = (
        lambda c: (
            c.operation == "fprop" and c.a == "int8" and c.out == "bf16" and c.arch == "sm_80"
        ),
        lambda c: c.operation == "fprop" and c.a == "fp32" and c.out == "fp32",
        lambda c: c.operation == "dgrad" and c.a == "bf16" and not c.strided,
        lambda c: c.operation == "dgrad" and c.a == "bf16" and c.strided,
        lambda c: c.operation == "wgrad" and c.a == "bf16" and c.order == "split_k",
        lambda c: (
            c.operation == "fprop" and c.a == "fp16" and c.arch == "sm_75" and c.out == "fp16"
        ),
    )
    return [min(filter(each, all_kernels()), key=cutlass_cpu.bytes_a_tile) for each in wanted]


KERNELS = tiers.chosen(
    one_of_each(),
    list(
        dict.fromkeys([*one_of_each(), *cutlass_cpu.covering(of_each_kind(), facts, one_of_each())])
    ),
    all_kernels(),
)


def build(configs: list[KernelConfig], folder: Path) -> dict[KernelConfig, Library]:
    """Compile kernels into libraries that accept CPU addresses."""

    def changed(pattern: str, replacement: str, original: str) -> str:
        text, count = re.subn(pattern, replacement, original)
        assert count == 1
        return text

    changes = {
        name: functools.partial(changed, *substitution) for name, substitution in CHANGED.items()
    }
    return cutlass_cpu.build(configs, folder, cutlass_cpu.changed_headers(folder, changes))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelConfig, Library]:
    return build(KERNELS, tmp_path_factory.mktemp("on_cpu"))


@pytest.mark.parametrize("config", KERNELS, ids=lambda config: config.name)
def test_results_are_equal_to_the_last_bit(
    libraries: dict[KernelConfig, Library], config: KernelConfig
) -> None:
    cutlass_conv_cpu.check(libraries[config], config)


# One kernel per operation: fprop, strided dgrad, and split-K wgrad.
ASKED = [config for config in one_of_each() if config.a in ("int8", "bf16") and config.strided]


@pytest.mark.parametrize("config", cutlass_cpu.parameters(KERNELS, ASKED, {"int8"}))
def test_kernels_on_cpu_equal_the_gpu_checks(
    libraries: dict[KernelConfig, Library], config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutlass_cpu.as_a_gpu(libraries, monkeypatch)
    test_conv.test_exact_sums_are_right_to_the_last_bit(config)
    test_conv.test_random_data_against_fp64(config)
