"""Shared parts of the GPU tests: the GPU, compiled kernels, operands, and two checks of results.

Exact: operands are small integers, so that sums are exact in any order. `cuda_emulation` computes
the epilogue to the last bit. Bounded: operands are random, and the distance to an FP64 result is
within the roundings of the kernel.

Invariant: only `DEVICE` depends on CUDA. The functions are tested with kernels on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_cache, kernel_registry
from qsync_fx.backend.cuda.kernel_build.kernel_cache import content_key
from qsync_fx.backend.cuda.kernel_build.library import GemmArguments, Library
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem, reference_result
from qsync_fx.backend.cuda.runtime import launch_utils
from qsync_fx.backend.cuda.runtime.device_state import known_of
from qsync_fx.backend.cuda.selection import candidates
from qsync_fx.devices.format_support import CUDA_SINCE
from qsync_fx.formats import FORMATS, encoding
from tests.support.cuda.on_cpu import cuda_emulation as emulation

AVAILABLE = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0)
COMPILES = os.environ.get("QSYNC_GPU_COMPILE", "1") != "0"
"""Whether tests may compile kernels that `build_kernels.py` has not. With 0 they are skipped, as
GPU time is expensive.
"""

FP8_SUMS = 2.0**-8
"""Error of FP8 sums, relative to the sum of magnitudes: tensor cores accumulate about 14 bits
(DeepSeek-V3 report, 3.3.2).
"""

GAP = 16


def missing() -> str:
    """Return why no test can run on this machine, or ""."""
    if not AVAILABLE:
        return "no GPU: nothing was tested"
    state = known_of(DEVICE)
    return "" if state.arch is not None else f"no kernels: {state.reason}"


def arch() -> Arch:
    """Return the architecture of this GPU, or H100's without one, for collection of tests."""
    detected = known_of(DEVICE).arch if AVAILABLE else None
    return detected or "sm_90a"


def lacks(fmt: str) -> str:
    """Return why tests in a format are skipped on this GPU, which has neither hardware units nor a
    kernel of ours for it, or "".
    """
    read = fmt if FORMATS[fmt].plain else encoding(FORMATS[fmt]).name
    since = CUDA_SINCE.get(read, (0, 0))
    capability = torch.cuda.get_device_capability(DEVICE) if AVAILABLE else since
    compiled_for = known_of(DEVICE).arch if AVAILABLE else None
    multiplied = (
        {config.a for config in candidates.all_configs(compiled_for)}
        if compiled_for is not None
        else set()
    )
    if capability >= since or read in multiplied:
        return ""
    return (
        f"{fmt} has units from compute capability {since[0]}.{since[1]} on, this GPU is of "
        f"{capability[0]}.{capability[1]}, and there is no kernel "
        "without them"
    )


def here(*formats: str) -> tuple[str, ...]:
    """Return the formats that this GPU supports."""
    return tuple(fmt for fmt in formats if not lacks(fmt))


def each_of(*formats: str) -> list[Any]:
    """Return formats as test parameters; those that this GPU lacks are skipped with a reason."""
    return [
        pytest.param(fmt, marks=[pytest.mark.skip(reason=why)] if (why := lacks(fmt)) else [])
        for fmt in formats
    ]


def configs(*operations: str) -> list[KernelConfig]:
    """Return every configuration of this GPU for these operations. Without a GPU, return one per
    format of `a`, to collect tests.
    """
    matching = [
        config for config in candidates.all_configs(arch()) if config.operation in operations
    ]
    if AVAILABLE or os.environ.get("QSYNC_GPU_COLLECT") == "all":
        return matching
    return list({config.a: config for config in reversed(matching)}.values())


def compiled(unit: TranslationUnit) -> bool:
    """Return whether the cache or a folder of precompiled kernels contains a unit's library."""
    content = content_key(unit)
    return any(
        kernel_cache.find(place, content, None)
        for place in (kernel_cache.root(), *kernel_cache.ahead_of_time())
    )


def library(unit: TranslationUnit) -> Library:
    """Return a unit's library; skip the test if compiling it is not allowed."""
    if not COMPILES and not compiled(unit):
        pytest.skip("its kernel was not compiled in the time given for that")
    loaded = kernel_registry.library(unit)
    assert loaded is not None
    return loaded


def whole_numbers(fmt: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return integers that every format represents, whose sums of products are exact in tensor
    cores.
    """
    high = 128 if fmt == "int8" else 3 if fmt.startswith("fp8") else 5
    return torch.randint(-high, high, tuple(shape), device=device).float().to(FORMATS[fmt].dtype)


def random_numbers(fmt: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return normal numbers in a format, or INT8 values over the full range."""
    if fmt == "int8":
        return whole_numbers(fmt, shape, device)
    values = torch.randn(tuple(shape), device=device)
    if fmt == "tf32":
        # Tensor cores ignore the last 13 bits.
        values = (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return values.to(FORMATS[fmt].dtype)


def wide(t: Tensor) -> Tensor:
    """Return a tensor in FP64, through FP32, which every type converts to."""
    return t.float().double()


def surrounded(matrix: Tensor) -> Tensor:
    """Return a larger tensor that contains a matrix; its other bytes are NaN, or large values."""
    rows, columns = matrix.shape
    memory = torch.empty((rows + 1, columns + GAP), dtype=matrix.dtype, device=matrix.device)
    memory.view(torch.uint8).fill_(0x7F)
    memory[:rows, :columns] = matrix
    return memory


def gemm(
    library: Library,
    config: KernelConfig,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Launch one kernel without its wrapper and return `d` `[m, n]`.

    Raise AssertionError if memory around `d` has changed.
    """
    (m, k), n = a.shape, b.shape[1]
    a_memory = surrounded(a if config.a_major == "row" else a.t())
    b_memory = surrounded(b if config.b_major == "row" else b.t())
    d = torch.full((m + 1, n + GAP), -77.0, dtype=FORMATS[config.out].dtype, device=a.device)
    vectors = [None if t is None else t.float().contiguous() for t in (a_scale, b_scale, bias)]
    pointers = [None if t is None else t.data_ptr() for t in vectors]
    arguments = GemmArguments(
        a=a_memory.data_ptr(), b=b_memory.data_ptr(), d=d.data_ptr(), a_scale=pointers[0],
        b_scale=pointers[1], bias=pointers[2],
        lda=a_memory.shape[1], ldb=b_memory.shape[1], ldd=d.shape[1], m=m, n=n, k=k,
        a_scale_per_row=a_scale is not None and a_scale.dim() > 0,
        b_scale_per_column=b_scale is not None and b_scale.dim() > 0,
        split=1, **launch_utils.device_arguments(a.device),
    )  # fmt: skip
    with launch_utils.guarded(a.device):
        launch_utils.run(library, arguments, a.device)
    assert (d[m:] == -77).all() and (d[:, n:] == -77).all(), "the kernel wrote beyond the result"
    return d[:m, :n]


def gemm_sizes(config: KernelConfig) -> list[tuple[int, int, int]]:
    """Return sizes that a kernel serves: less than one tile, some tiles with a remainder in each
    dimension, and a long sum over few tiles.
    """
    step = {"m": 1, "n": config.out_alignment, "k": 1}
    for name, major, inner in (("a", config.a_major, "row"), ("b", config.b_major, "column")):
        contiguous = "k" if major == inner else "m" if name == "a" else "n"
        step[contiguous] = max(step[contiguous], config.alignment)
    m, n, k = config.tile
    wanted = [(1, 1, 1), (m + 3, n + 3, 2 * k + 3), (2 * m + 1, 3 * n - 5, k - 1), (5, n + 1, 2000)]
    return [(_up(i, step["m"]), _up(j, step["n"]), _up(l, step["k"])) for i, j, l in wanted]  # noqa: E741


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def scales(
    config: KernelConfig, rows: int, columns: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return scales per tensor or per row and column if a kernel reads them; no INT8 sum exceeds
    FP16's range.
    """
    if config.a_scale == "none":
        return None, None
    unit = 1 / 64 if config.out == "fp16" else 1.0
    a_scale = (torch.rand(rows if config.a_scale == "channel" else (), device=device) + 0.5) * unit
    return a_scale, (
        torch.rand(columns if config.b_scale == "channel" else (), device=device) + 0.5
    ) * unit


def assert_equal(
    result: Tensor, sums: Tensor, config: KernelConfig, *epilogue: Tensor | None
) -> None:
    """Assert that a result equals exact sums (FP64, `[..., n]`) with scales and bias bit by bit.

    Args:
        epilogue: a's scale, b's scale and the bias, as passed to the kernel.
    """
    a_scale, b_scale, bias = (None if t is None else t.cpu().float() for t in epilogue)
    if a_scale is not None and a_scale.dim():
        a_scale = a_scale.reshape(-1, 1)
    out = FORMATS[config.out].dtype
    want = emulation.finish(sums.cpu().float(), a_scale, b_scale, bias, out)
    have = result.cpu()
    wrong = (have != want) & ~(have.isnan() & want.isnan())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values: {have[wrong][:4]} for {want[wrong][:4]}"
    )


def assert_near(
    result: Tensor,
    sums: Tensor,
    magnitudes: Tensor,
    terms: int,
    config: KernelConfig,
    *epilogue: Tensor | None,
) -> None:
    """Assert that a result equals FP64 sums with scales and bias up to a kernel's roundings.

    Args:
        magnitudes: sums of the products' magnitudes.
        terms: number of products per sum.
    """
    a_scale, b_scale, bias = (None if t is None else t.double() for t in epilogue)
    if a_scale is not None and a_scale.dim():
        a_scale = a_scale.reshape(-1, 1)
    factor = (1.0 if a_scale is None else a_scale) * (1.0 if b_scale is None else b_scale)
    added = torch.zeros((), dtype=torch.float64, device=sums.device) if bias is None else bias
    want = sums * factor + added
    # k roundings of partial sums (Higham 2002, 3.1), of two units each: tensor cores truncate.
    relative = (
        FP8_SUMS
        if config.a.startswith("fp8")
        else 0.0
        if config.a == "int8"
        else (terms + 1) * 2.0**-22
    )
    bound = (relative * magnitudes + 2.0**-126) * factor + 4 * 2.0**-24 * (want.abs() + added.abs())
    bound = bound + torch.finfo(FORMATS[config.out].dtype).eps / 2 * (want.abs() + bound) + 1e-7
    error = (wide(result) - want).abs()
    assert (error <= bound).all(), f"the error is {(error / bound).max():.3g} times the bound"
    if config.a.startswith("fp8") and terms > 1:
        # The bound covers the worst case; the norm shows an accumulator that loses bits.
        assert error.norm() <= 0.02 * want.norm() + bound.norm() * 0.02


def convolved(p: ConvProblem, a: Tensor, b: Tensor) -> Tensor:
    """Return a convolution's sums in FP64, `[..., channels]`, on the operands' device."""
    size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
    geometry = p.stride, p.padding, p.dilation
    return reference_result.convolve(wide(a), wide(b), size, geometry, p.operation).permute(
        0, 2, 3, 1
    )


def convolved_size(p: ConvProblem) -> int:
    """Return the number of values in a convolution's result."""
    return {
        "fprop": p.n * p.p * p.q * p.k,
        "dgrad": p.n * p.h * p.w * p.c,
        "wgrad": p.k * p.r * p.s * p.c,
    }[p.operation]
