"""Translation units of a few lines without CUTLASS, which nvcc compiles in two seconds.

Invariant: they have the complete C interface and a kernel, so they can replace real units in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qsync_fx.backend.cuda.codegen import TranslationUnit
from qsync_fx.backend.cuda.kernel_build import compiler

_SOURCE = """\
#include <cuda_runtime.h>
#include "abi.h"

using Arguments = qsync::GemmArguments;

// {remark}
__global__ void kernel(const float *a, float *d, int n) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    {body}
}}

#pragma GCC visibility push(default)
extern "C" {{
int qsync_abi() {{ return {abi}; }}
const char *qsync_name() {{ return "{name}"; }}
int qsync_can_implement(const Arguments *arguments) {{ return arguments->n % 4 == 0 ? 0 : 7; }}
std::int64_t qsync_workspace(const Arguments *arguments) {{ return std::int64_t(arguments->m) * 1000000007; }}
int qsync_run(const Arguments *arguments, void *workspace, void *stream) {{
    if (workspace == nullptr) return 3;
    int n = arguments->n;
    kernel<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const float *>(arguments->a), static_cast<float *>(arguments->d), n);
    return cudaGetLastError() == cudaSuccess ? 0 : 8;
}}
int qsync_shared_memory() {{ return 4096; }}
const char *qsync_error(int status) {{
    return status == 7 ? "Error Misaligned Operand" : status == 3 ? "Error Workspace Null" : "Error Internal";
}}
}}
"""

ADDS = "if (i < n) d[i] = 2.f * a[i] + 1.f;"

SPILLS = """\
float kept[300];
    for (int j = 0; j < 300; ++j) kept[j] = a[i + j];
    for (int j = 0; j < n; ++j) kept[(j * 7) % 300] += d[j];
    for (int j = 0; j < 300; ++j) d[i * 300 + j] = kept[j];"""


def small_unit(
    name: str = "small", remark: str = "", body: str = ADDS, **changes: Any
) -> TranslationUnit:
    """Return a unit; a new `remark` makes it absent from every cache."""
    fields = {"abi": "QSYNC_ABI_VERSION", "name": name} | {
        key: changes.pop(key) for key in ("abi",) if key in changes
    }
    source = _SOURCE.format(remark=remark, body=body, **fields)
    return TranslationUnit(
        **({"name": name, "arch": "sm_80", "source": source, "interface": "gemm"} | changes)
    )


def build(units: Sequence[TranslationUnit], **options: Any) -> dict[TranslationUnit, Path]:
    """Return the library of each unit from `compiler.attempt`; raise the first failure."""
    built = compiler.attempt(units, **options)
    for error in built.failures.values():
        raise error
    return built.libraries
