"""Host code of a compiled convolution: CUTLASS accepts all problems that the constraints allow.

One kernel is compiled, for sm_80; tests/support/cuda/compiled/cuda_compile_all.py compiles all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from test_cuda_conv import problems

from qsync_fx.backend.cuda import codegen, toolchain
from qsync_fx.backend.cuda.kernel_build import library as libraries
from qsync_fx.backend.cuda.kernel_build.library import ConvArguments
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem
from qsync_fx.backend.cuda.selection import constraints
from qsync_fx.backend.cuda.selection.candidates import candidates
from qsync_fx.errors import ToolchainError
from tests.support import tiers
from tests.support.cuda.compiled.small_units import build


def arguments(p: ConvProblem, /, **changed: Any) -> ConvArguments:
    (pad_h, pad_w), (stride_h, stride_w), (dilation_h, dilation_w) = p.padding, p.stride, p.dilation
    fields: dict[str, int] = {
        "a": 4096,
        "b": 8192,
        "d": 16384,
        "a_scale": 64,
        "b_scale": 64,
        "bias": 64 if p.bias else 0,
    }
    fields |= {name: getattr(p, name) for name in "nhwckrspq"}
    fields |= {"pad_h": pad_h, "pad_w": pad_w, "dilation_h": dilation_h, "dilation_w": dilation_w}
    fields |= {
        "stride_h": stride_h,
        "stride_w": stride_w,
        "b_scale_per_channel": p.b_scale == "channel",
    }
    fields |= {"split": 1, "device": 0, "multiprocessors": 108}
    return ConvArguments(**fields | changed)


pytestmark = tiers.ALL


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> tuple[KernelConfig, libraries.Library]:
    """Compile a split-K weight gradient, which has the most decisions in host code."""
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(error.what)
    problem = ConvProblem(
        "wgrad",
        8,
        56,
        56,
        64,
        64,
        3,
        3,
        (1, 1),
        (1, 1),
        (1, 1),
        "bf16",
        "bf16",
        "fp32",
        "tensor",
        "tensor",
    )
    config = next(
        c for c in candidates(problem, "sm_80") if c.tile == (64, 64, 32) and c.order == "split_k"
    )
    unit = codegen.conv_source(config)
    folder = tmp_path_factory.mktemp("conv")
    return config, libraries.load(build([unit], progress=False, folder=folder)[unit], unit)


@settings(max_examples=200)
@given(data=st.data())
def test_kernel_accepts_all_valid_problems(
    kernel: tuple[KernelConfig, libraries.Library], data: st.DataObject
) -> None:
    config, library = kernel
    fixed = {
        "operation": "wgrad",
        "out": "fp32",
        "a_scale": "tensor",
        "bias": False,
        "b_scale": "tensor",
    }
    problem = data.draw(problems(data.draw(st.sampled_from([1, 4, 8])), fmt="bf16", **fixed))
    refused = library.can_implement(arguments(problem))
    if constraints.serves(config, problem) is None:
        assert refused is None
    elif problem.c % 8 or problem.k % 8 or min(problem.p, problem.q) < 1:
        assert refused is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"a": 4098},
        {"b": 0},
        {"d": 16388},
        {"p": 55},
        {"n": 0},
        {"pad_h": -1},
        {"stride_w": 0},
        {"bias": 64},
        {"b_scale_per_channel": 1},
        {"split": -1},
        {"c": 60},
    ],
)
def test_wrong_arguments_are_refused(
    kernel: tuple[KernelConfig, libraries.Library], changed: dict[str, int]
) -> None:
    problem = ConvProblem(
        "wgrad",
        8,
        56,
        56,
        64,
        64,
        3,
        3,
        (1, 1),
        (1, 1),
        (1, 1),
        "bf16",
        "bf16",
        "fp32",
        "tensor",
        "tensor",
    )
    assert kernel[1].can_implement(arguments(problem)) is None
    assert kernel[1].can_implement(arguments(problem, **changed)) is not None


def test_parts_keep_the_device_busy(kernel: tuple[KernelConfig, libraries.Library]) -> None:
    """Check that the workspace has a counter for each tile if the reduction has several parts."""
    config, library = kernel
    small = ConvProblem(
        "wgrad", 8, 56, 56, 64, 64, 3, 3, (1, 1), (1, 1), (1, 1), "bf16", "bf16", "fp32"
    )
    assert library.workspace(arguments(small)) == 4 * 9
    wide = dataclasses.replace(small, n=1, h=7, w=7, c=1024, k=1024)
    assert library.workspace(arguments(wide)) == 0
    assert library.workspace(arguments(wide, split=2)) == 4 * 16 * 144
    assert libraries.shared_memory(library.path) >= 6 * (64 + 64) * 32 * 2
    assert config.stages == 6
