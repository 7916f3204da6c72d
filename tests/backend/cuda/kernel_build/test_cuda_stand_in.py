"""CUDA calls of kernels, checked by a stand-in for the runtime: grids, shared memory, clusters,
tensor maps, the stream, and no other calls.

The fast tier runs a quantizer and a copy. The tier all adds a kernel of each operation and order
for some targets, the tier every one of each kind for each target. Compilation dominates the run
time, mostly of large tiles.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import CONVERT_TYPES, TranslationUnit
from qsync_fx.backend.cuda.kernel_config import BY_CAPABILITY, Arch, KernelConfig
from qsync_fx.backend.cuda.selection import candidates
from tests.support import tiers
from tests.support.cuda.compiled import kernel_caches
from tests.support.cuda.compiled.small_units import build
from tests.support.cuda.on_cpu import cutlass_cpu
from tests.support.cuda.stand_ins import stand_in
from tests.support.cuda.stand_ins.stand_in import Call

TOOLS = kernel_caches.tools_or_skip()
SOMEWHERE = 1 << 20
"""Address of tensors, whose memory is not accessed."""

ARCHITECTURES = list(dict.fromkeys(BY_CAPABILITY.values()))


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.version.cuda is not None:
        pytest.skip("libraries use the CUDA runtime of torch, not the stand-in")
    return stand_in.runtime(tmp_path_factory.mktemp("runtime"))


def pointers(*names: str) -> dict[str, int]:
    return {name: SOMEWHERE * (index + 1) for index, name in enumerate(names)}


def quantized(rows: int, columns: int, group: int = 0) -> dict[str, int]:
    return {
        **pointers("x", "q", "scale", "seed"),
        "rows": rows,
        "columns": columns,
        "ldx": columns,
        "rounding": 1,
        "group": group,
        "multiprocessors": 40,
    }


def copied(rows: int, columns: int) -> dict[str, int]:
    sizes = {
        "batches": 1,
        "rows": rows,
        "columns": columns,
        "ldx": columns,
        "y_batches": 1,
        "y_rows": columns,
        "y_columns": rows,
    }
    return {
        **pointers("x", "y"),
        **sizes,
        "x_type": CONVERT_TYPES["bits8"],
        "y_type": CONVERT_TYPES["bits8"],
        "turned": 1,
        "multiprocessors": 40,
    }


def plain(arch: Arch) -> list[tuple[TranslationUnit, dict[str, int]]]:
    quantizer, copier = (
        codegen.quantizer(arch, "fp32", "int8"),
        codegen.copier(arch),
    )
    sizes = ((1, 1), (33, 70), (4096, 4096), (2, 2**24))
    return [(quantizer, quantized(*size, group)) for size in sizes for group in (0, 1, 2)] + [
        (copier, copied(*size)) for size in sizes
    ]


def products(arch: Arch, every_config: bool) -> list[tuple[KernelConfig, dict[str, int]]]:
    """Return kernels with sizes from one tile to many: one for each operation and order, with
    `every_config` also for each format, schedule and layout.
    """
    chosen: dict[tuple[object, ...], KernelConfig] = {}
    for config in candidates.all_configs(arch) if every_config else one_of_each(arch):
        more = (config.a, config.schedule, config.a_major, config.b_major) if every_config else ()
        chosen.setdefault((config.operation, config.order, *more), config)
    return [
        (config, fields)
        for config in chosen.values()
        for fields in (_gemms(config) if config.operation == "gemm" else _convs(config))
    ]


def one_of_each(arch: Arch) -> list[KernelConfig]:
    """Return the preferred kernels: on Hopper only its own, on other targets small tiles first, on
    sm_75 in one order.

    Hopper's dgrad is omitted, because it is launched like fprop: test_cuda_hopper_on_cpu.py
    computes it on the CPU.
    """
    every = candidates.all_configs(arch)
    if arch == "sm_90a":
        products = [config for config in every if codegen.on_hopper(config)]
        return [
            *products,
            *(
                config
                for config in every
                if codegen.on_hopper(config) and config.operation == "fprop"
            ),
        ]
    narrow = [config for config in every if config.a in ("int8", "bf16", "fp16")]
    return sorted(
        (config for config in narrow if arch != "sm_75" or config.order == "identity"),
        key=cutlass_cpu.bytes_a_tile,
    )


def _gemms(config: KernelConfig) -> list[dict[str, int]]:
    cases = []
    for m, n, k in ((128, 128, 128), (16, 16, 64), (4096, 8192, 1024), (65536 * 16, 128, 64)):
        lda, ldb = (k if config.a_major == "row" else m), (k if config.b_major == "column" else n)
        cases.append(
            {
                **pointers("a", "b", "d"),
                "lda": lda,
                "ldb": ldb,
                "ldd": n,
                "m": m,
                "n": n,
                "k": k,
                "split": 1,
                "multiprocessors": 40,
            }
        )
    return cases


def _convs(config: KernelConfig) -> list[dict[str, int]]:
    cases = []
    for n, size, c, k in ((2, 14, 64, 128), (64, 56, 64, 64)):
        stride = 2 if config.operation == "dgrad" and config.strided else 1
        out = (size + 2 - 3) // stride + 1
        sizes = {"n": n, "h": size, "w": size, "c": c, "k": k, "r": 3, "s": 3, "p": out, "q": out}
        window = {
            "pad_h": 1,
            "pad_w": 1,
            "stride_h": stride,
            "stride_w": stride,
            "dilation_h": 1,
            "dilation_w": 1,
        }
        cases.append(
            {**pointers("a", "b", "d"), **sizes, **window, "split": 1, "multiprocessors": 40}
        )
    return cases


@functools.cache
def library(unit: TranslationUnit) -> Path:
    return build([unit], progress=False)[unit]


def check(
    runtime: Path, cases: list[tuple[TranslationUnit, dict[str, int]]]
) -> list[dict[str, Any]]:
    build(list({unit: None for unit, _ in cases}), progress=False)
    calls = [
        Call(str(library(unit)), unit.name, unit.interface, unit.arch, fields)
        for unit, fields in cases
    ]
    answers = stand_in.checked(runtime, calls)
    for call, answer in zip(calls, answers, strict=True):
        assert not answer["wrong"] and not answer["elsewhere"], (call.name, call.arguments, answer)
        assert answer["status"] == 0, (call.name, call.arguments, answer)
        assert any(line.startswith("launch") for line in answer["lines"]), (call.name, answer)
    return answers


@pytest.mark.parametrize("arch", ["sm_75"])
def test_a_quantizer_and_a_copy(runtime: Path, arch: Arch) -> None:
    answers = check(runtime, plain(arch))
    # One kernel computes the maximum magnitude and one rounds. With many scales, another kernel
    # combines partial maxima.
    assert {len(answer["lines"]) for answer in answers} <= {1, 2, 3}


@tiers.ALL
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_a_kernel_of_each_operation(runtime: Path, arch: Arch) -> None:
    judge(runtime, arch, every_config=False)


@tiers.EVERY
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kind_of_kernel(runtime: Path, arch: Arch) -> None:
    judge(runtime, arch, every_config=True)


def judge(runtime: Path, arch: Arch, every_config: bool) -> None:
    chosen = [(codegen.unit_of(config), fields) for config, fields in products(arch, every_config)]
    answers = check(runtime, [*(plain(arch) if every_config else ()), *chosen])
    lines = [line for answer in answers for line in answer["lines"]]
    assert any(line.startswith("map") for line in lines) is (arch == "sm_90a"), (
        "only kernels for Hopper use tensor maps"
    )
    shared = [int(match[1]) for line in lines if (match := re.search(r"shared (\d+)", line))]
    assert max(shared) > 48 << 10 or arch == "sm_75", (
        "some kernels need more than the default 48 KiB of shared memory"
    )


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def test_the_stand_in_does_complain(tmp_path: Path) -> None:
    """Check that the stand-in reports errors; without reports the tests above cannot fail.

    The library has its own name, because other tests load the real runtime into this process.
    """
    library = ctypes.CDLL(str(stand_in.runtime(tmp_path, "libcudart_apart.so.1")))
    library.stand_in_lines.restype = ctypes.c_char_p
    library.cudaLaunchKernel.argtypes = [
        ctypes.c_void_p,
        Dim3,
        Dim3,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]

    def launch(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int) -> list[str]:
        library.stand_in_reset(7, 5, 40, 64 << 10)
        library.cudaLaunchKernel(1, Dim3(*grid), Dim3(*block), None, shared, None)
        lines = library.stand_in_lines().decode().splitlines()
        return [
            line.removeprefix("wrong ")
            for line in lines
            if line.startswith("wrong") and "no kernel" not in line
        ]

    assert launch((2**31 - 1, 65535, 1), (1024, 1, 1), 48 << 10) == []
    assert launch((1, 65536, 1), (32, 1, 1), 0) == launch((0, 1, 1), (32, 1, 1), 0) == ["grid"]
    assert launch((1, 1, 1), (1025, 1, 1), 0) == launch((1, 1, 1), (1, 1, 65), 0) == ["block"]
    assert launch((1, 1, 1), (32, 1, 1), 49 << 10) == [
        "shared memory beyond what the kernel has asked for"
    ]
    assert "shared memory beyond the GPU's" in launch((1, 1, 1), (32, 1, 1), 65 << 10)
    library.cudaDeviceSynchronize()
    assert library.stand_in_lines().decode().endswith("wrong cudaDeviceSynchronize\n")
