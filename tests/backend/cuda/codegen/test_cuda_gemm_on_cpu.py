"""Bit-exact tests of GEMM kernels for tensor cores and SIMT units, run on the CPU.

Compilation dominates the run time: the fast tier has few kernels, the tier all covers each pair of
formats, layout and order of each target, and the tier every has all 2.x kernels (half an hour).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch

from qsync_fx.backend.cuda import toolchain
from qsync_fx.backend.cuda.codegen import on_hopper
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import GemmProblem, padding
from qsync_fx.backend.cuda.problem.problem import GemmProduct
from qsync_fx.backend.cuda.runtime import launch
from qsync_fx.backend.cuda.selection import constraints
from qsync_fx.backend.cuda.selection.candidates import gemm_configs
from qsync_fx.errors import ToolchainError
from qsync_fx.formats import FORMATS
from tests.gpu import test_gemm
from tests.support import tiers
from tests.support.cuda.on_cpu import cuda_emulation as emulation, cutlass_cpu

try:
    toolchain.toolchain()
except ToolchainError as error:
    pytest.skip(str(error), allow_module_level=True)

# The first test compiles the kernels of all tests.
pytestmark = pytest.mark.timeout(3600)


def all_kernels() -> list[KernelConfig]:
    """Return the 2.x kernels, but only one of kernels that differ in no more than the target sm_80
    or sm_89: their source is the same.
    """
    kernels: dict[KernelConfig, KernelConfig] = {}
    for arch in ("sm_75", "sm_80", "sm_89"):
        for config in gemm_configs(arch):
            if not on_hopper(config):
                kernels.setdefault(
                    dataclasses.replace(config, arch="sm_75" if arch == "sm_75" else "sm_80"),
                    config,
                )
    return list(kernels.values())


def of_each_kind() -> list[KernelConfig]:
    """Return the smallest kernel for each target, operand formats, layouts and order."""
    kinds = (((c.arch, c.a, c.b, c.a_major, c.b_major, c.order), c) for c in all_kernels())
    return cutlass_cpu.smallest(kinds)


def facts(c: KernelConfig) -> Iterable[object]:
    return (c.arch, c.a, c.b), (c.arch, c.order), (c.arch, c.a_major, c.b_major)


def one_of_each() -> list[KernelConfig]:
    """Return the smallest kernel for each predicate."""
    wanted: tuple[Callable[[KernelConfig], bool], ...] = (
        lambda c: c.arch == "sm_75" and c.a == "int8",
        lambda c: c.arch == "sm_80" and c.a == "int8" and c.order == "stream_k",
        lambda c: c.a == "bf16" and (c.a_major, c.b_major) == ("column", "row"),
        lambda c: c.a == "fp16" and c.arch == "sm_80" and (c.a_major, c.b_major) == ("row", "row"),
        lambda c: c.a == "tf32" and (c.a_major, c.b_major) == ("column", "row"),
        lambda c: c.a == "fp8_e5m2",
        lambda c: c.a == "fp32" and c.arch == "sm_80" and c.order == "stream_k",
        lambda c: c.a == "bf16" and c.alignment == 2,
    )
    kernels = all_kernels()
    return [min(filter(each, kernels), key=cutlass_cpu.bytes_a_tile) for each in wanted]


# The fast tier has the kernels of two formats for one target.
KERNELS = tiers.chosen(
    [kernel for kernel in one_of_each() if kernel.arch == "sm_80" and kernel.a in ("int8", "bf16")],
    list(
        dict.fromkeys([*one_of_each(), *cutlass_cpu.covering(of_each_kind(), facts, one_of_each())])
    ),
    all_kernels(),
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelConfig, Library]:
    return cutlass_cpu.build(KERNELS, tmp_path_factory.mktemp("on_cpu"))


@pytest.mark.parametrize("config", KERNELS, ids=lambda config: config.name)
def test_results_are_equal_to_the_last_bit(
    libraries: dict[KernelConfig, Library], config: KernelConfig
) -> None:
    cutlass_cpu.check(libraries[config], config)


@tiers.one_in(2)
@pytest.mark.parametrize("config", cutlass_cpu.parameters(KERNELS, one_of_each(), {"int8", "bf16"}))
def test_kernels_on_cpu_equal_the_gpu_checks(
    libraries: dict[KernelConfig, Library], config: KernelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the checks of tests/gpu, which are independent of this file: FP64, longer sums,
    nonfinite values.
    """
    cutlass_cpu.as_a_gpu(libraries, monkeypatch)
    test_gemm.test_exact_sums_are_right_to_the_last_bit(config)
    test_gemm.test_random_data_against_fp64(config)
    test_gemm.test_nonfinite_values_stay_in_their_rows(config)


def test_scales_that_are_not_numbers_make_their_rows_so(
    libraries: dict[KernelConfig, Library],
) -> None:
    config = next(config for config in KERNELS if config.a == "int8")
    m, n, k = cutlass_cpu.sizes(config)[1]
    a, b = cutlass_cpu.operands(config, m, n, k, torch.Generator().manual_seed(0))
    a_scale = torch.ones(m)
    a_scale[3] = torch.nan
    result = cutlass_cpu.run(libraries[config], config, a, b, a_scale, torch.ones(()), None)
    assert result[3].isnan().all() and result.isnan().sum() == n


@pytest.mark.parametrize(
    "problem",
    [
        GemmProblem(
            37, 41, 50, "int8", "int8", "bf16", "row", "column", "channel", "channel", True
        ),
        GemmProblem(37, 41, 50, "int8", "int8", "bf16", "column", "row", "tensor", "tensor"),
        GemmProblem(70, 90, 33, "bf16", "bf16", "bf16", "column", "row"),
    ],
    ids=["filled up", "laid out anew", "backward"],
)
def test_the_wrapper_around_a_kernel(
    libraries: dict[KernelConfig, Library], problem: GemmProblem
) -> None:
    """Call a tensor-core kernel as the operators do: with zero padding, layout changes and cropped
    results.
    """
    generator = torch.Generator().manual_seed(5)
    for padded in padding.alternatives(problem):
        served = [
            config
            for config in KERNELS
            if config.arch == "sm_80" and constraints.serves(config, padded) is None
        ]
        if served:
            break
    (config, *_) = served
    assert isinstance(padded, GemmProblem)
    a, b = cutlass_cpu.operands(config, problem.m, problem.n, problem.k, generator)
    a = a if problem.a_major == "row" else a.t().contiguous().t()
    b = b if problem.b_major == "row" else b.t().contiguous().t()
    drawn = {
        "none": None,
        "tensor": torch.tensor(0.01),
        "channel": torch.rand(max(problem.m, problem.n), generator=generator),
    }
    a_scale, b_scale = drawn[problem.a_scale], drawn[problem.b_scale]
    if a_scale is not None and b_scale is not None and a_scale.dim():
        a_scale, b_scale = a_scale[: problem.m].clone(), b_scale[: problem.n].clone()
    bias = torch.rand(problem.n, generator=generator) if problem.bias else None
    x = GemmProduct(a, b, a_scale, b_scale, bias)
    result = launch.call_site(libraries[config], config, problem, padded, x)(x)
    assert torch.equal(
        result, emulation.gemm(a, b, a_scale, b_scale, bias, FORMATS[problem.out].dtype)
    )
