"""What a call of a CUDA kernel takes in Python: from the function behind `qsync::gemm` to the kernel's library, which does nothing here.

A training step calls hundreds of kernels, and a small GPU waits for Python where it has nothing else to do. No GPU is needed: operands lie
on the CPU, which counts as a T4, and the library is a few functions of C that return at once, so what is left is ours: checks, the call's
site, filling in its arguments, the memory of the result. "decided anew" forgets the site after each call, as if each had to find out which
kernel computes, how operands lie and what it is told; "torch.mm" is a product of 2 x 2, of which torch's own way to a kernel is most.
Times are the processor's, cases take turns.
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

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry, library as abi
from qsync_fx.backend.cuda.kernel_build.library import load
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.backend.cuda.problem import Problem
from qsync_fx.backend.cuda.problem.problem_from_tensors import (
    ConvWindow,
    conv_problem,
    gemm_problem,
)
from qsync_fx.backend.cuda.runtime import call_cache
from qsync_fx.backend.cuda.runtime.device_state import assumed, decision
from qsync_fx.backend.operators import quantize
from qsync_fx.backend.operators.gemm import gemm, implicit_gemm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import Target
from benchmarks.support.harness import Row, arguments, finish, measure

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
    """Has a unit's library loaded, as one that launches nothing."""
    source, library = folder / f"{unit.name}.c", folder / f"{unit.name}.so"
    source.write_text(_NOTHING.format(abi=abi.VERSION, name=unit.name))
    subprocess.run(["g++", "-x", "c", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    kernel_registry._had[unit] = load(library, unit)


def chosen(problem: Problem, folder: Path) -> None:
    """Has the kernel that computes a problem loaded."""
    config = decision(problem, CPU).config
    assert config is not None, problem
    had(kernel_registry.unit_of(config), folder)


def product(folder: Path, size: int) -> Callable[[], Tensor]:
    """Returns the call of a linear layer's product in INT8, with scales and bias."""
    a = torch.ones(64 * size, 256, dtype=torch.int8)
    b = torch.ones(64, 256, dtype=torch.int8).t()
    scale, bias = torch.ones(()), torch.ones(64)
    chosen(gemm_problem(a, b, scale, scale, bias, torch.float16, False), folder)
    return lambda: gemm._kernel(a, b, scale, scale, bias, torch.float16, False)


def convolution(folder: Path, size: int) -> Callable[[], Tensor]:
    """Returns the call of a convolution's output in INT8, with scales and bias, channels last."""
    image = torch.ones(size, 64, 8, 8, dtype=torch.int8).to(memory_format=torch.channels_last)
    weight = torch.ones(64, 64, 3, 3, dtype=torch.int8).to(memory_format=torch.channels_last)
    scale, bias = torch.ones(()), torch.ones(64)
    window = ConvWindow((1, 1), (1, 1), (1, 1))
    chosen(
        conv_problem(
            image, weight, scale, scale, bias, (3, 3), window, "fprop", torch.float16, False
        ),
        folder,
    )
    one = [1, 1]
    return lambda: implicit_gemm._kernel(
        image, weight, scale, scale, bias, [3, 3], one, one, one, "fprop", torch.float16, False
    )


def quantizer(folder: Path, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Returns the call that quantizes an activation to INT8."""
    x, seed = torch.randn(64 * size, 256), torch.zeros(1, dtype=torch.int64)
    had(kernel_registry.quantizer(ARCH, "fp32", "int8"), folder)
    return lambda: quantize._quantize_kernel(x, seed, 3, "int8", "stochastic", [])


def anew(call: Callable[[], object]) -> Callable[[], object]:
    """Returns a call that finds no site: of operands that no other case has."""

    def run() -> object:
        before = len(call_cache.cached_call)
        found = call()
        # The last one that was kept, which is this call's.
        (
            call_cache.cached_call
            if len(call_cache.cached_call) > before
            else call_cache.cached_quantizer_call
        ).popitem()
        return found

    return run


CASES: dict[str, Callable[[Path, int], Callable[[], object]]] = {
    "product of INT8": product,
    "convolution of INT8": convolution,
    "quantizing to INT8": quantizer,
}


def often(call: Callable[[], object]) -> Callable[[], None]:
    """Returns `CALLS` calls, as in a step: one by itself finds the processor's caches full of something else."""

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
            ways = {
                "a call": made(folder, 2),
                "decided anew": anew(made(folder, 3)),
                "torch.mm": lambda: torch.mm(small, small),
            }
            times = measure(
                {name: often(way) for name, way in ways.items()},
                5 if options.quick else 101,
                clock=time.process_time,
            )
            for way in times:
                took = times.median(way) * 1e6 / CALLS
                row = {
                    "case": case,
                    "name": way,
                    "microseconds": took,
                    "to_mm": times.ratio(way, "torch.mm"),
                }
                rows.append(row | (MOST.judged(took) if way == "a call" else {}))
    finish(options, rows)


if __name__ == "__main__":
    main()
