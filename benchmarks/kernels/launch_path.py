"""Python overhead of a CUDA kernel call.
It is measured from the implementation of `qsync::gemm` to the kernel library, which is a no-op
here. A training step calls hundreds of kernels, and the GPU waits for Python when it has no queued
work. No GPU is needed: operands are CPU tensors that count as on a T4. The time covers checks, the
call cache, kernel arguments and the allocation of the result. Rows: "a call" hits the call cache,
the next row misses it and selects the kernel again, and "torch.mm" multiplies 2 x 2 matrices, which
is mostly torch's dispatch overhead. Runs are interleaved; "microseconds" is the median CPU time per
call, and "to_mm" the median ratio to torch.mm.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry, library as abi
from qsync_fx.backend.cuda.kernel_build.library import load
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.problem.problem import (
    ConvProduct,
    GemmProduct,
    conv_problem,
    gemm_problem,
)
from qsync_fx.backend.cuda.runtime import launch, quantize_launch
from qsync_fx.backend.cuda.runtime.device_state import assumed, decision
from qsync_fx.backend.operators import quantize
from qsync_fx.backend.operators.gemm import gemm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import Target
from benchmarks.support.harness import Row, arguments, by_size, finish, measure

ARCH: Arch = "sm_75"
CPU = torch.device("cpu")
CALLS = 100
MOST = Target("at most 15 microseconds of Python a call", most=15)

_NOTHING = """\
#include <stdint.h>
int qsync_abi(void) {{ return {abi}; }}
const char *qsync_name(void) {{ return "{name}"; }}
int qsync_can_implement(const void *arguments) {{ return 0; }}
int64_t qsync_workspace(const void *arguments) {{ return 0; }}
int qsync_run(const void *arguments, void *workspace, void *stream) {{ return 0; }}
int qsync_shared_memory(void) {{ return 0; }}
const char *qsync_error(int status) {{ return 0; }}
"""


def had(unit: TranslationUnit, folder: Path) -> None:
    """Register a no-op library for a translation unit."""
    source, library = folder / f"{unit.name}.c", folder / f"{unit.name}.so"
    source.write_text(_NOTHING.format(abi=abi.VERSION, name=unit.name))
    subprocess.run(["g++", "-x", "c", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    kernel_registry._had[unit] = load(library, unit)


def chosen(problem: Problem, folder: Path) -> None:
    """Register a no-op library for the kernel that is selected for a problem."""
    config = decision(problem, CPU).config
    assert config is not None, problem
    had(codegen.unit_of(config), folder)


def product(folder: Path, size: int) -> Callable[[], Tensor]:
    """Return the call of a linear layer's INT8 product with scales and bias."""
    a = torch.ones(64 * size, 256, dtype=torch.int8)
    b = torch.ones(64, 256, dtype=torch.int8).t()
    scale, bias = torch.ones(()), torch.ones(64)
    x = GemmProduct(a, b, scale, scale, bias, torch.float16)
    chosen(gemm_problem(x), folder)
    return lambda: gemm._gemm_kernel(*x)


def convolution(folder: Path, size: int) -> Callable[[], Tensor]:
    """Return the call of a channels-last INT8 convolution (output) with scales and bias."""
    image = torch.ones(size, 64, 8, 8, dtype=torch.int8).to(memory_format=torch.channels_last)
    weight = torch.ones(64, 64, 3, 3, dtype=torch.int8).to(memory_format=torch.channels_last)
    scale, bias = torch.ones(()), torch.ones(64)
    unit = [1, 1]
    x = ConvProduct(
        image, weight, scale, scale, bias, [3, 3], unit, unit, unit, "fprop", torch.float16
    )
    chosen(conv_problem(x), folder)
    return lambda: gemm._conv_kernel(*x)


def quantizer(folder: Path, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return the call that quantizes an activation to INT8."""
    x, seed = torch.randn(64 * size, 256), torch.zeros(1, dtype=torch.int64)
    had(codegen.quantizer(ARCH, "fp32", "int8"), folder)
    return lambda: quantize._quantize_kernel(x, seed, 3, "int8", "stochastic", [])


def anew(call: Callable[[], object]) -> Callable[[], object]:
    """Return `call` with its entry removed from the call cache after each run.

    `call` must use operands of other shapes than all other cases.
    """

    def run() -> object:
        before = len(launch.cached_call)
        result = call()
        # `popitem` removes the entry that was added last, which is this call's.
        if len(launch.cached_call) > before:
            launch.cached_call.popitem()
        else:
            quantize_launch.cached_quantizer_call.popitem()
        return result

    return run


CASES: dict[str, Callable[[Path, int], Callable[[], object]]] = {
    "product of INT8": product,
    "convolution of INT8": convolution,
    "quantizing to INT8": quantizer,
}


def often(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that makes `CALLS` calls: a single call would measure cold CPU caches."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def main() -> None:
    options = arguments(__doc__)
    small = torch.ones(2, 2)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, assumed(ARCH, on="cpu"):
        folder = Path(name)
        for case, made in CASES.items():
            paths = {
                "a call": made(folder, 2),
                "decided anew": anew(made(folder, 3)),
                "torch.mm": lambda: torch.mm(small, small),
            }
            times = measure(
                {name: often(path) for name, path in paths.items()},
                by_size(options.quick, 5, 101),
                clock=time.process_time,
            )
            for path in times:
                took = times.median(path) * 1e6 / CALLS
                row = {
                    "case": case,
                    "name": path,
                    "microseconds": took,
                    "to_mm": times.ratio(path, "torch.mm"),
                }
                if path == "a call":
                    row |= MOST.columns(took)
                rows.append(row)
    finish(options, rows)


if __name__ == "__main__":
    main()
