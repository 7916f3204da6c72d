"""CPU features: instruction sets, and native units for BF16 and INT8 products.

Unknown features are reported as empty, not guessed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from qsync_fx import _C, environment
from qsync_fx.errors import OptionError
from qsync_fx.formats import FORMATS, precision
from qsync_fx.torch_internals import _disable_current_modes, _int_mm

_FEATURES = {
    "avx2": ("avx2",),
    "avx512": ("avx512f avx512bw avx512dq avx512vl",),
    "vnni": ("avx512_vnni", "avx_vnni"),
    "bf16": ("avx512_bf16",),
    "amx": ("amx_tile amx_int8 amx_bf16",),
}
"""Instruction sets by the flags of /proc/cpuinfo: all flags of one alternative are required."""
_UNITS = {"vnni", "amx"}
"""Instruction sets that multiply INT8."""


@dataclass(frozen=True)
class Cpu:
    """Processor of a machine.

    Attributes:
        features: subset of "avx2", "avx512", "vnni" (INT8 products), "bf16" and "amx".
        cores: physical cores; None if the system does not report them.
        threads: threads that this process may use.
    """

    model: str
    features: tuple[str, ...]
    cores: int | None
    threads: int


def cpu(cpuinfo: str | None = None) -> Cpu:
    """Return the processor described by a text; by default this machine's /proc/cpuinfo."""
    if cpuinfo is None:
        cpuinfo = ""
        with contextlib.suppress(OSError):
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    entries = [
        {key.strip(): value.strip() for key, value in re.findall("(.*?):(.*)", entry)}
        for entry in cpuinfo.split("\n\n")
    ]
    flags = set(entries[0].get("flags", entries[0].get("Features", "")).split())
    features = (
        name
        for name, alternatives in _FEATURES.items()
        if any(flags.issuperset(alternative.split()) for alternative in alternatives)
    )
    cores = {
        (entry["physical id"], entry["core id"])
        for entry in entries
        if {"physical id", "core id"} <= entry.keys()
    }
    threads = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        threads = len(os.sched_getaffinity(0))
    return Cpu(
        model=entries[0].get("model name", platform.processor()),
        features=tuple(features),
        cores=len(cores) or None,
        threads=threads,
    )


_WITHOUT: Final = "SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_CORE AVX512_CORE_VNNI".split()
"""Values of ONEDNN_MAX_CPU_ISA that exclude BF16 units; no query of torch reports them."""


def native_bf16_unit() -> bool:
    """Return whether oneDNN multiplies BF16 in a native unit (AVX512-BF16, AMX, Arm).

    Torch reports support from AVX-512 on, where products without a unit are slower than in FP32.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    features = cpu().features
    if not features:
        return True
    narrowed = environment.text("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return bool({"bf16", "amx"}.intersection(features)) and narrowed.upper() not in _WITHOUT


@functools.cache
def multiplied_in_fp32() -> tuple[torch.dtype, ...]:
    """Return the 16-bit types that oneDNN does not multiply on this CPU, without AVX-512.

    `qsync_fx.backend.operators.products_in_fp32` multiplies them in FP32.
    """
    formats = [row for row in FORMATS.values() if row.plain and row.bits == 16]
    queries = [getattr(torch.ops.mkldnn, f"_is_mkldnn_{row.name}_supported") for row in formats]
    return tuple(row.dtype for row, query in zip(formats, queries, strict=True) if not query())


@functools.cache
def cpu_multiplies_integers() -> bool:
    """Return whether torch multiplies INT8 matrices exactly and with a unit of this CPU.

    Without a unit, oneDNN adds two products in 16 bits with saturation on Intel's processors, and
    needs 25 to 45 times FP32's time on AMD's (docs/known-issues.md). Exactness is tested by
    computation, because no query of torch reports the effect of ONEDNN_MAX_CPU_ISA.
    """
    features = cpu().features
    if features and not _UNITS.intersection(features):
        return False
    # The caller may be tracing with fake tensors, which have no values.
    with _disable_current_modes():
        int8 = precision("int8")
        largest = torch.full((4, 8), int(int8.max), dtype=int8.dtype, device="cpu")
        result = [_int_mm(largest, sign * largest.t()) * sign for sign in (1, -1)]
        return all(bool((sums == 8 * int8.max**2).all()) for sums in result)


@functools.cache
def wrong_path() -> OptionError | None:
    """Return the error of an invalid QSYNC_CPU_ISA, which computations raise; else None."""
    try:
        _C.isa()
    except OptionError as error:
        return error
    return None


@functools.cache
def native_integer_unit() -> bool:
    """Return whether the native module multiplies INT8 with AMX or VNNI."""
    return wrong_path() is None and _C.isa() in ("amx", "avx512_vnni")


@functools.cache
def native_integer_products() -> bool:
    """Return whether the native module multiplies INT8 faster than torch multiplies FP32.

    It does with a unit, and by 16-bit multiply-add on a processor that has AVX2 at most: 0.6 to 0.8
    of FP32's time (AMD EPYC, Zen 3). On AVX-512 without VNNI this was not measured.
    """
    if native_integer_unit():
        return True
    wider = {*_UNITS, "avx512"}
    return wrong_path() is None and _C.isa() == "avx2" and not wider.intersection(cpu().features)
