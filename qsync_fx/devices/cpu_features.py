"""The processor of this machine, as the system tells it.

Invariant: it looks and changes nothing, and what cannot be found out is left empty, never guessed.

Whether this CPU has a unit for BF16.

Invariant: a processor of which nothing is known is what torch says it is.

What this CPU makes of products of integers: by the native module, and by oneDNN.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from qsync_fx import _C, environment
from qsync_fx.errors import OptionError
from qsync_fx.formats import precision

_FEATURES = {
    "avx2": ("avx2",),
    "avx512": ("avx512f avx512bw avx512dq avx512vl",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16",),
    "amx": ("amx_tile amx_int8 amx_bf16",),
}
"""Instruction sets by the flags of /proc/cpuinfo: all of one of the alternatives."""


@dataclass(frozen=True)
class Cpu:
    """The processor.

    Attributes:
        model: as the system names it; empty if it does not.
        features: of "avx2", "avx512", "vnni" (INT8 products), "bf16" and "amx", those it has.
        cores: physical cores of the machine; None where the system does not say.
        threads: threads that this process may use.
    """

    model: str
    features: tuple[str, ...]
    cores: int | None
    threads: int


def cpu(cpuinfo: str | None = None) -> Cpu:
    """Returns the processor that a text like Linux's /proc/cpuinfo describes; this machine's by default."""
    if cpuinfo is None:
        cpuinfo = ""
        with contextlib.suppress(OSError):
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    entries = [
        {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in entry.splitlines())
        }
        for entry in cpuinfo.split("\n\n")
        if entry.strip()
    ]
    first = entries[0] if entries else {}
    flags = set(first.get("flags", first.get("Features", "")).split())
    cores = {
        (entry["physical id"], entry["core id"])
        for entry in entries
        if {"physical id", "core id"} <= entry.keys()
    }
    return Cpu(
        model=first.get("model name", platform.processor()),
        features=tuple(
            name
            for name, methods in _FEATURES.items()
            if any(flags.issuperset(method.split()) for method in methods)
        ),
        cores=len(cores) or None,
        threads=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
    )


_WITHOUT: Final = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
)
"""Values of ONEDNN_MAX_CPU_ISA, which narrows what oneDNN uses and which no query of torch's knows."""


def native_bf16_unit() -> bool:
    """Whether oneDNN multiplies BF16 by a unit for it here (AVX512-BF16, AMX, Arm's), and not by converting to FP32 and back.

    Torch says that BF16 is supported from AVX-512 on. On a processor that has it without BF16 a product then takes longer than in FP32.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    features = cpu().features
    if not features:
        return True
    narrowed = environment.text("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return bool({"bf16", "amx"}.intersection(features)) and narrowed.upper() not in _WITHOUT


@functools.cache
def cpu_multiplies_integers() -> bool:
    """Whether oneDNN's products of INT8 matrices are exact on this CPU.

    Without VNNI (AVX2, and AVX-512 before Cascade Lake) oneDNN adds two products up in 16 bits, saturated, so that eight of 127 by 127
    come out as 1020 (docs/known-issues.md). That is tried, not looked up: what oneDNN uses is narrowed by ONEDNN_MAX_CPU_ISA, which no
    query of torch's knows.
    """
    # Whoever asks may be tracing, where nothing has a value.
    with _disable_current_modes():
        int8 = precision("int8")
        largest = torch.full((4, 8), int(int8.max), dtype=int8.dtype, device="cpu")
        result = [torch._int_mm(largest, sign * largest.t()) * sign for sign in (1, -1)]
        return all(bool((sums == 8 * int8.max**2).all()) for sums in result)


@functools.cache
def wrong_path() -> OptionError | None:
    """Returns why the native module computes nothing here: QSYNC_CPU_ISA is wrong; None where it is not.

    It is raised where something is computed; whoever looks a machine over is to see the rest of it.
    """
    try:
        _C.isa()
    except OptionError as error:
        return error
    return None


@functools.cache
def native_integer_unit() -> bool:
    """Whether the native module multiplies INT8 by a unit for it (AMX, VNNI), and not by arithmetic that floats are as fast in."""
    return wrong_path() is None and _C.isa() in ("amx", "avx512_vnni")
