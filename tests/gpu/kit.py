"""What the tests on a GPU share: the GPU, compiled kernels, operands, and the two ways of asking
whether a result is right.

Exact: operands are small whole numbers, so that sums are exact in any order, and what is left is
    the epilogue, which `cuda_emulation` computes to the last bit. Bounded: operands are random, and
    a result is as far from FP64's as its roundings allow.

Invariant: nothing here is bound to CUDA but `DEVICE`: the same functions check kernels that run on
    the CPU, which is how they are tested.
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
"""Whether tests may compile what `build_kernels.py` has not: with 0 they are skipped, as minutes on
a GPU are dear.
"""

FP8_SUMS = 2.0**-8
"""How far FP8 sums may be off, relative to the sum of magnitudes: tensor cores keep some 14 bits of
them (DeepSeek-V3 report, 3.3.2).
"""

GAP = 16


def missing() -> str:
    """Returns why nothing can be tested here; "" where it can."""
    if not AVAILABLE:
        return "no GPU: nothing was tested"
    found = known_of(DEVICE)
    return "" if found.arch is not None else f"no kernels: {found.reason}"


def arch() -> Arch:
    """Returns the architecture of this GPU; H100's where there is none, so that tests can be
    collected.
    """
    found = known_of(DEVICE).arch if AVAILABLE else None
    return found or "sm_90a"


def lacks(fmt: str) -> str:
    """Returns why tests in a format are left out on this GPU: no unit of its own and no kernel of
    ours multiplies it; "" where one does.
    """
    read = fmt if FORMATS[fmt].plain else encoding(FORMATS[fmt]).name
    since = CUDA_SINCE.get(read, (0, 0))
    here = torch.cuda.get_device_capability(DEVICE) if AVAILABLE else since
    compiled_for = known_of(DEVICE).arch if AVAILABLE else None
    multiplied = (
        {config.a for config in candidates.all_configs(compiled_for)}
        if compiled_for is not None
        else set()
    )
    if here >= since or read in multiplied:
        return ""
    return (
        f"{fmt} has units from compute capability {since[0]}.{since[1]} on, this GPU is of "
        f"{here[0]}.{here[1]}, and there is no kernel "
        "without them"
    )


def here(*formats: str) -> tuple[str, ...]:
    """Returns those of some formats that this GPU has units for."""
    return tuple(fmt for fmt in formats if not lacks(fmt))


def each_of(*formats: str) -> list[Any]:
    """Returns formats as parameters of a test, which is skipped, and says why, for those that this
    GPU has no unit for.
    """
    return [
        pytest.param(fmt, marks=[pytest.mark.skip(reason=why)] if (why := lacks(fmt)) else [])
        for fmt in formats
    ]


def configs(*operations: str) -> list[KernelConfig]:
    """Returns every configuration of this GPU for these operations; without one, a single kernel
    for each format, to collect tests with.
    """
    found = [config for config in candidates.all_configs(arch()) if config.operation in operations]
    if AVAILABLE or os.environ.get("QSYNC_GPU_COLLECT") == "all":
        return found
    return list({config.a: config for config in reversed(found)}.values())


def compiled(unit: TranslationUnit) -> bool:
    """Whether a unit's library is kept, here or in a folder of kernels built ahead of time."""
    content = content_key(unit)
    return any(
        kernel_cache.find(place, content, None)
        for place in (kernel_cache.root(), *kernel_cache.ahead_of_time())
    )


def library(unit: TranslationUnit) -> Library:
    """Returns a unit's library; skips the test where it would have to be compiled and must
    not be.
    """
    if not COMPILES and not compiled(unit):
        pytest.skip("its kernel was not compiled in the time given for that")
    found = kernel_registry.library(unit)
    assert found is not None
    return found


def whole_numbers(fmt: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns numbers that every format has, whose sums of products are exact in the sums of tensor
    cores.
    """
    high = 128 if fmt == "int8" else 3 if fmt.startswith("fp8") else 5
    return torch.randint(-high, high, tuple(shape), device=device).float().to(FORMATS[fmt].dtype)


def random_numbers(fmt: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns normal numbers in a format, INT8 over its whole range."""
    if fmt == "int8":
        return whole_numbers(fmt, shape, device)
    found = torch.randn(tuple(shape), device=device)
    if fmt == "tf32":
        # Tensor cores do not look at the last 13 bits.
        found = (found.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return found.to(FORMATS[fmt].dtype)


def wide(t: Tensor) -> Tensor:
    """Returns a tensor in FP64, by way of FP32, which every type converts to."""
    return t.float().double()


def surrounded(matrix: Tensor) -> Tensor:
    """Returns larger memory that holds a matrix, whose other bytes are NaN, or large."""
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
    """Runs one kernel, past everything that surrounds it, and returns `d` `[m, n]`.

    What lies around `d` must stay as it is.
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
    assert (d[m:] == -77).all() and (d[:, n:] == -77).all(), "it wrote beyond the result"
    return d[:m, :n]


def gemm_sizes(config: KernelConfig) -> list[tuple[int, int, int]]:
    """Returns sizes that a kernel serves: less than one tile, some tiles with a rest each way, and
    a long sum over few tiles.
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
    """Returns scales for each row and column, where a kernel reads any; such that no sum of INT8
    leaves FP16.
    """
    if config.a_scale == "none":
        return None, None
    unit = 1 / 64 if config.out == "fp16" else 1.0
    a_scale = (torch.rand(rows if config.a_scale == "channel" else (), device=device) + 0.5) * unit
    return a_scale, (
        torch.rand(columns if config.b_scale == "channel" else (), device=device) + 0.5
    ) * unit


def assert_equal(
    found: Tensor, sums: Tensor, config: KernelConfig, *epilogue: Tensor | None
) -> None:
    """Asserts that a result is its exact sums (FP64, `[..., n]`) with scales and bias, to the last
    bit.

    Args:
        epilogue: a's scale, b's scale and the bias, as the kernel got them.
    """
    a_scale, b_scale, bias = (None if t is None else t.cpu().float() for t in epilogue)
    if a_scale is not None and a_scale.dim():
        a_scale = a_scale.reshape(-1, 1)
    out = FORMATS[config.out].dtype
    want = emulation.finish(sums.cpu().float(), a_scale, b_scale, bias, out)
    have = found.cpu()
    wrong = (have != want) & ~(have.isnan() & want.isnan())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} values: {have[wrong][:4]} for {want[wrong][:4]}"
    )


def assert_near(
    found: Tensor,
    sums: Tensor,
    magnitudes: Tensor,
    terms: int,
    config: KernelConfig,
    *epilogue: Tensor | None,
) -> None:
    """Asserts that a result is FP64's sums with scales and bias, up to the roundings that a kernel
    makes.

    Args:
        magnitudes: sums of the products' magnitudes.
        terms: how many products there are in one.
    """
    a_scale, b_scale, bias = (None if t is None else t.double() for t in epilogue)
    if a_scale is not None and a_scale.dim():
        a_scale = a_scale.reshape(-1, 1)
    factor = (1.0 if a_scale is None else a_scale) * (1.0 if b_scale is None else b_scale)
    added = torch.zeros((), dtype=torch.float64, device=sums.device) if bias is None else bias
    want = sums * factor + added
    # k roundings of partial sums (Higham 2002, 3.1), at two units each: tensor cores truncate.
    relative = (
        FP8_SUMS
        if config.a.startswith("fp8")
        else 0.0
        if config.a == "int8"
        else (terms + 1) * 2.0**-22
    )
    bound = (relative * magnitudes + 2.0**-126) * factor + 4 * 2.0**-24 * (want.abs() + added.abs())
    bound = bound + torch.finfo(FORMATS[config.out].dtype).eps / 2 * (want.abs() + bound) + 1e-7
    error = (wide(found) - want).abs()
    assert (error <= bound).all(), f"an error of {(error / bound).max():.3g} times what is allowed"
    if config.a.startswith("fp8") and terms > 1:
        # The bound is for the worst case; an accumulator that loses bits shows in the whole.
        assert error.norm() <= 0.02 * want.norm() + bound.norm() * 0.02


def convolved(p: ConvProblem, a: Tensor, b: Tensor) -> Tensor:
    """Returns the sums of a convolution's product in FP64, its channels last, `[..., channels]`, on
    the operands' device.
    """
    size = (p.h, p.w) if p.operation == "dgrad" else (p.r, p.s)
    how = p.stride, p.padding, p.dilation
    return reference_result.convolve(wide(a), wide(b), size, how, p.operation).permute(0, 2, 3, 1)


def convolved_size(p: ConvProblem) -> int:
    """Returns how many values the result of a convolution's product has."""
    return {
        "fprop": p.n * p.p * p.q * p.k,
        "dgrad": p.n * p.h * p.w * p.c,
        "wgrad": p.k * p.r * p.s * p.c,
    }[p.operation]
