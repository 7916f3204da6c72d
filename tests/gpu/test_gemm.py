"""GEMM kernels of this GPU: exact sums bit by bit, random data within the kernel's roundings of
FP64, for all sizes.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import LARGEST_K
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import GemmProblem
from qsync_fx.backend.cuda.problem.problem import GemmProduct
from qsync_fx.backend.cuda.runtime import event_timer, launch, launch_utils
from tests.gpu import kit

CONFIGS = kit.configs("gemm")
each = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)


def operands(
    config: KernelConfig, m: int, n: int, k: int, draw: object = kit.random_numbers
) -> tuple[Tensor, Tensor]:
    return draw(config.a, (m, k), kit.DEVICE), draw(config.b, (k, n), kit.DEVICE)  # type: ignore[operator]


def epilogue(
    config: KernelConfig, m: int, n: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    bias = torch.randn(n, device=kit.DEVICE) if config.bias else None
    return *kit.scales(config, m, n, kit.DEVICE), bias


@each
def test_exact_sums_are_right_to_the_last_bit(config: KernelConfig) -> None:
    library = kit.library(codegen.unit_of(config))
    for size in kit.gemm_sizes(config):
        a, b = operands(config, *size, draw=kit.whole_numbers)
        with_all = epilogue(config, size[0], size[1])
        sums = kit.wide(a) @ kit.wide(b)
        kit.assert_equal(kit.gemm(library, config, a, b, *with_all), sums, config, *with_all)
        kit.assert_equal(kit.gemm(library, config, a, b), sums, config, None, None, None)
        if with_all[0] is not None and with_all[1] is not None:
            single = with_all[0][0], with_all[1][0], with_all[2]
            kit.assert_equal(kit.gemm(library, config, a, b, *single), sums, config, *single)


@each
def test_random_data_against_fp64(config: KernelConfig) -> None:
    library = kit.library(codegen.unit_of(config))
    for m, n, k in kit.gemm_sizes(config):
        a, b = operands(config, m, n, k)
        with_all = epilogue(config, m, n)
        result = kit.gemm(library, config, a, b, *with_all)
        sums, magnitudes = kit.wide(a) @ kit.wide(b), kit.wide(a).abs() @ kit.wide(b).abs()
        kit.assert_near(result, sums, magnitudes, k, config, *with_all)


@each
def test_nonfinite_values_stay_in_their_rows(config: KernelConfig) -> None:
    library = kit.library(codegen.unit_of(config))
    m, n, k = kit.gemm_sizes(config)[1]
    a, b = operands(config, m, n, k, draw=kit.whole_numbers)
    a_scale, b_scale, bias = epilogue(config, m, n)
    rows = 0, m // 2, m - 1
    if config.a == "int8":
        # Quantizing NaN gives a NaN scale and zeros.
        assert a_scale is not None
        clean = kit.gemm(library, config, a, b, a_scale, b_scale, bias)
        a_scale[list(rows)] = torch.nan
    else:
        clean = kit.gemm(library, config, a, b, a_scale, b_scale, bias)
        wide = a.float()
        wide[rows[0], 0], wide[rows[1], -1], wide[rows[2]] = torch.nan, torch.nan, torch.inf
        a = wide.to(a.dtype)
    result = kit.gemm(library, config, a, b, a_scale, b_scale, bias).float()
    others = [row for row in range(m) if row not in rows]
    assert torch.equal(result[others], clean.float()[others])
    # Infinities in the third row need not become NaN.
    assert result[list(rows[:2])].isnan().all()


@each
def test_the_largest_values(config: KernelConfig) -> None:
    """INT8: the minimum of its range with the longest sum of a kernel. Others: sums that may
    overflow the output.
    """
    library = kit.library(codegen.unit_of(config))
    m, n, k = kit.gemm_sizes(config)[0]
    if config.a == "int8":
        k = LARGEST_K["int8"] // config.alignment * config.alignment
        low = torch.full((m, k), -128, dtype=torch.int8, device=kit.DEVICE)
        sums = torch.full((m, n), k * 2.0**14, dtype=torch.float64)
        kit.assert_equal(
            kit.gemm(library, config, low, low[:1].t().expand(k, n)), sums, config, None, None, None
        )
        return
    largest = float(torch.finfo(kit.FORMATS[config.a].dtype).max)
    a = torch.full((m, k), largest, device=kit.DEVICE).to(kit.FORMATS[config.a].dtype)
    b = torch.ones((k, n), device=kit.DEVICE).to(kit.FORMATS[config.b].dtype)
    result = kit.gemm(library, config, a, b).double()
    limit = torch.finfo(kit.FORMATS[config.out].dtype).max
    want = kit.wide(a) @ kit.wide(b)
    near = (result - want).abs() <= 0.01 * want
    assert (near | (result.isinf() & (want > 0.99 * limit))).all()


def test_tuner_check_accepts_the_results() -> None:
    """`event_timer.differs`, which rejects wrong kernels in tuning, accepts a correct result and
    rejects a wrong one.
    """
    fmt = "fp16" if kit.lacks("bf16") else "bf16"
    config = next(config for config in CONFIGS if config.a == fmt)
    problem = GemmProblem(256, 512, 384, fmt, fmt, config.out, config.a_major, config.b_major)
    product = event_timer.operands(problem, kit.DEVICE)
    assert isinstance(product, GemmProduct)
    library = kit.library(codegen.unit_of(config))
    result = launch.call_site(library, config, problem, problem, product)(product)
    assert event_timer.differs(result, product) == ""
    assert event_timer.differs(result * 1.1, product)


SIZES = ((0, 8, 8), (8, 0, 8), (8, 8, 0), (1, 1, 1), (3, 5, 7), (33, 17, 129), (257, 1000, 31))
FORMATS = kit.here("int8", "fp8", "fp16", "bf16", "tf32", "fp32")


def asked() -> list[GemmProblem]:
    """Return the problems of the operator tests, to compile their kernels in advance."""
    many = ((m, n, k, fmt) for m, n, k in SIZES for fmt in FORMATS if m * n * k)
    return [
        GemmProblem(m, n, k, fmt, fmt, "fp32", "row", "row", "channel", "none", True)
        for m, n, k, fmt in many
    ]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_operator_supports_any_size(fmt: str, size: tuple[int, int, int]) -> None:
    """`qsync::gemm` equals its CPU result, computed by a kernel, a padded kernel or torch."""
    from qsync_fx.backend.operators.gemm.gemm import gemm

    m, n, k = size
    kind = dataclasses.replace(CONFIGS[0], a=fmt, b=fmt)
    a, b = operands(kind, m, n, k, draw=kit.whole_numbers)
    bias, scale = torch.randn(n, device=kit.DEVICE), torch.rand(m, 1, device=kit.DEVICE) + 0.5
    launch_utils.forget()
    result = gemm(a, b, scale, None, bias, torch.float32, fmt == "tf32")
    want = gemm(a.cpu(), b.cpu(), scale.cpu(), None, bias.cpu(), torch.float32, fmt == "tf32")
    assert torch.allclose(result.cpu(), want, rtol=1e-6, atol=1e-5)
