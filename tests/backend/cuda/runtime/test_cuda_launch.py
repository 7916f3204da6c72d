"""Launch wrapper of the CUDA kernels: arguments, padding, copies, and the fallback to torch.

Without a GPU, `host_kernels.cpp` implements the interface of kernels as loops on host memory, which
reject operands that a kernel would misread. Everything but the choice of the stream is therefore as
on a device.
"""

from __future__ import annotations

import functools
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda import codegen, toolchain
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.kernel_cache import TEMPLATES
from qsync_fx.backend.cuda.kernel_build.library import Library, load
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import (
    ConvProblem,
    GemmProblem,
    Problem,
    padding,
    reference_result,
)
from qsync_fx.backend.cuda.problem.problem import (
    ConvProduct,
    GemmProduct,
    conv_problem,
    gemm_problem,
)
from qsync_fx.backend.cuda.runtime import launch, launch_utils
from qsync_fx.backend.cuda.runtime.device_state import assumed, decision, stored
from qsync_fx.errors import KernelError, PlanWarning, ToolchainError
from tests.support import tiers
from tests.support.cuda.compiled.small_units import build, small_unit
from tests.support.cuda.large_products import INT8

CPU = torch.device("cpu")
OPERANDS = {"int8": "std::int8_t", "fp32": "float"}
OPERATIONS = ("fprop", "dgrad", "wgrad")


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Library]:
    folder = tmp_path_factory.mktemp("host kernels")
    return functools.cache(lambda *variant: _compiled(folder, *variant))


def _compiled(folder: Path, fmt: str, *variant: str) -> Library:
    name = "_".join((fmt, *variant))
    defines = {"NAME": f'"{name}"', "OPERAND": OPERANDS[fmt]}
    if variant[0] in OPERATIONS:
        defines["CONV"] = str(OPERATIONS.index(variant[0]))
    else:
        defines |= {
            "A_BY_ROWS": str(int(variant[0] == "row")),
            "B_BY_ROWS": str(int(variant[1] == "row")),
        }
    source = Path(__file__).parents[3] / "support" / "cuda" / "stand_ins" / "host_kernels.cpp"
    flags = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        f"-I{TEMPLATES}",
    ]
    library = folder / f"{name}.so"
    subprocess.run(
        ["g++", *flags, *(f"-D{k}={v}" for k, v in defines.items()), "-o", library, source],
        check=True,
    )
    return load(
        library, TranslationUnit(name, "sm_80", "", "conv" if variant[0] in OPERATIONS else "gemm")
    )


def config(problem: Problem) -> KernelConfig:
    operation = "gemm" if isinstance(problem, GemmProblem) else problem.operation
    alignment = 16 if problem.a == "int8" else 4
    return KernelConfig(
        operation, "sm_80", problem.a, problem.b, problem.out, (128, 128, 64), alignment=alignment
    )


def whole(shape: tuple[int, ...], fmt: str) -> Tensor:
    """Return integers whose products have exact sums in FP32, in any order."""
    return torch.randint(-127, 128, shape).to(torch.int8 if fmt == "int8" else torch.float32)


def lying(t: Tensor, layout: str) -> Tensor:
    """Return the same matrix with another layout or alignment."""
    rows, columns = t.shape
    match layout:
        case "column":
            return t.t().contiguous().t()
        case "sliced":
            return t.new_empty(rows + 1, columns + 16)[1:, 16:].copy_(t)
        case "shifted":  # not aligned to 16 bytes
            return t.new_empty(rows * columns + 1)[1:].view(rows, columns).copy_(t)
        case "sparse":
            return t.new_empty(2 * rows, 3 * columns)[::2, ::3].copy_(t)
        case _:
            return t


LAYOUTS = st.sampled_from(["row", "column", "sliced", "shifted", "sparse"])
SCALES = st.sampled_from(["none", "tensor", "channel"])


def scales(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    return None if kind == "none" else torch.rand(shape if kind == "channel" else ()) + 0.5


@settings(max_examples=60)
@given(
    st.tuples(*[st.integers(1, 40)] * 3),
    st.sampled_from(["int8", "fp32"]),
    LAYOUTS,
    LAYOUTS,
    SCALES,
    SCALES,
    st.booleans(),
    st.data(),
)
def test_matrices_reach_a_kernel_as_they_are(
    host: Callable[..., Library],
    sizes: tuple[int, int, int],
    fmt: str,
    a_lies: str,
    b_lies: str,
    a_kind: str,
    b_kind: str,
    biased: bool,
    data: st.DataObject,
) -> None:
    """Check that results equal torch bit for bit, for any sizes and strides and each orientation
    and padding that a kernel supports.
    """
    m, n, k = sizes
    a, b = lying(whole((m, k), fmt), a_lies), lying(whole((k, n), fmt), b_lies)
    scales_and_bias = (
        scales(a_kind, (m, 1)),
        scales(b_kind, (1, n)),
        torch.randn(n) if biased else None,
    )
    x = GemmProduct(a, b, *scales_and_bias)
    problem = gemm_problem(x)
    aligned = [
        padded for padded in padding.alternatives(problem) if padding.filled(padded) == padded
    ]
    padded = data.draw(st.sampled_from(aligned))
    assert isinstance(padded, GemmProblem)
    library = host(fmt, padded.a_major, padded.b_major)
    result = launch.call_site(library, config(padded), problem, padded, x)(x)
    assert result.is_contiguous() and torch.equal(result, reference_result.gemm(x))


@st.composite
def convolutions(draw: st.DrawFn) -> ConvProblem:
    def pair(least: int, most: int) -> tuple[int, int]:
        return draw(st.integers(least, most)), draw(st.integers(least, most))

    (n, _), (h, w), (c, k), (r, s) = pair(1, 3), pair(1, 7), pair(1, 18), pair(1, 3)
    problem = ConvProblem(
        draw(st.sampled_from(OPERATIONS)), n, h, w, c, k, r, s, pair(0, 2), pair(1, 2), pair(1, 2),
        *[draw(st.sampled_from(["int8", "fp32"]))] * 2, "fp32",
        draw(st.sampled_from(["none", "tensor"])),
    )  # fmt: skip
    assume(min(problem.p, problem.q) > 0)
    if problem.operation == "fprop":
        return replace(problem, b_scale=draw(SCALES), bias=draw(st.booleans()))
    return replace(problem, b_scale=draw(st.sampled_from(["none", "tensor"])))


def conv_operands(p: ConvProblem) -> tuple[Tensor, Tensor]:
    x, weight, y = (p.n, p.c, p.h, p.w), (p.k, p.c, p.r, p.s), (p.n, p.k, p.p, p.q)
    first, second = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
    return whole(first, p.a), whole(second, p.b)


@settings(max_examples=60)
@given(convolutions(), st.booleans(), st.booleans())
def test_images_reach_a_kernel_as_they_are(
    host: Callable[..., Library], problem: ConvProblem, last: bool, plain: bool
) -> None:
    p = problem
    a, b = conv_operands(p)
    if last:
        a, b = (t.contiguous(memory_format=torch.channels_last) for t in (a, b))
    scales_and_bias = (
        scales(p.a_scale, ()),
        scales(p.b_scale, (1, p.k, 1, 1)),
        torch.randn(p.k) if p.bias else None,
    )
    size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
    x = ConvProduct(a, b, *scales_and_bias, size, p.stride, p.padding, p.dilation, p.operation)
    assert conv_problem(x) == p
    padded = padding.filled(p)
    assert isinstance(padded, ConvProblem)
    result = launch.call_site(host(p.a, p.operation), config(p), p, padded, x)(x)
    want = reference_result.conv2d_product(x)
    assert result.is_contiguous(memory_format=torch.channels_last) and torch.equal(result, want)


def test_unsupported_operands_are_reported(host: Callable[..., Library]) -> None:
    a, b = whole((4, 24), "int8"), whole((24, 8), "int8")
    x = GemmProduct(a, b, None, None, None)
    problem = gemm_problem(x)
    with pytest.raises(Exception, match="misaligned"):
        launch.call_site(host("int8", "row", "row"), config(problem), problem, problem, x)(x)


# From an operator's arguments to a result, by a kernel or by torch.


def through(
    a: Tensor, b: Tensor, *scales_and_bias: Any, out: torch.dtype = torch.float32
) -> Tensor:
    return launch.gemm(GemmProduct(a, b, *(scales_and_bias or (None, None, None)), out))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (5, 4, 0), (0, 0, 0)])
def test_empty_products_are_launched_nowhere(m: int, n: int, k: int) -> None:
    bias = torch.randn(n)
    with assumed("sm_80", on="cpu"):
        result = through(
            whole((m, k), "int8"), whole((k, n), "int8"), None, None, bias, out=torch.bfloat16
        )
    assert result.shape == (m, n) and result.dtype == torch.bfloat16
    assert torch.equal(result, bias.bfloat16().expand(m, n))


def test_fallback_reasons_are_recorded() -> None:
    launch_utils.forget()
    a, b = whole((33, 32), "bf16"), whole((32, 16), "bf16").t().contiguous().t()
    with assumed("sm_80", on="cpu"):
        result = through(a, b)
    assert torch.equal(result, (a.double() @ b.double()).float())
    [(problem, why)] = launch_utils.reasons().items()
    assert problem.startswith("gemm 33 x 16 x 32") and "without tuning" in why
    for index in range(1200):
        launch_utils.note(str(index), "why")
    assert len(launch_utils.reasons()) == 1000 and "1199" in launch_utils.reasons()


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolate the registry of loaded, stored and disabled kernels from other tests."""
    monkeypatch.setattr(kernel_registry, "_had", {})
    monkeypatch.setattr(kernel_registry, "_refused", set())
    monkeypatch.setattr(kernel_registry, "_prepared", False)
    kernel_registry._stored.cache_clear()
    yield
    kernel_registry._stored.cache_clear()


@tiers.ALL
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a GPU would run the kernel on memory of the host"
)
@pytest.mark.usefixtures("own_kernels")
def test_a_kernel_that_cannot_be_started_is_torchs_to_compute() -> None:
    """Select, compile and load the real kernel of a product; its launch fails without a GPU, so
    torch computes the result and records the reason.
    """
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(error.what)
    launch_utils.forget()
    a, b = whole((2048, 2048), "int8"), whole((2048, 2048), "int8").t()
    with assumed("sm_80", on="cpu"):
        problem = gemm_problem(GemmProduct(a, b, None, None, None, torch.bfloat16))
        selected = decision(problem, CPU)
        assert selected.config is not None
        unit = codegen.unit_of(selected.config)
        assert kernel_registry.library(unit, wait=False) is None
        with warnings.catch_warnings(action="ignore", category=PlanWarning):
            y = through(a, b, out=torch.bfloat16)
        # The kernel was loaded, and is not launched again.
        assert kernel_registry.refused(unit)
        with pytest.raises(KernelError, match=r"cannot be launched|does not support"):
            kernel_registry.library(unit, wait=False)
    assert torch.equal(y, (a.double() @ b.double()).to(torch.float32).to(torch.bfloat16))
    assert any(
        "cannot be launched" in why or "does not support" in why
        for why in launch_utils.reasons().values()
    )


@pytest.mark.usefixtures("own_kernels")
def test_compiled_kernels_are_available_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("QSYNC_KERNELS_PATH", raising=False)
    try:
        toolchain.toolchain()
    except ToolchainError as error:
        pytest.skip(error.what)
    unit = small_unit("a_kernel")
    build([unit], progress=False)
    monkeypatch.setenv("QSYNC_NVCC", str(tmp_path / "none"))
    assert kernel_registry.stored(unit) and not kernel_registry.stored(small_unit("a third"))
    assert stored(INT8, "sm_80") == ()
