"""The processor of this machine, as the system tells it.

Invariant: it looks and changes nothing, and what cannot be found out is left empty, never guessed.
"""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

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
        {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in entry.splitlines())}
        for entry in cpuinfo.split("\n\n")
        if entry.strip()
    ]
    first = entries[0] if entries else {}
    flags = set(first.get("flags", first.get("Features", "")).split())
    cores = {
        (entry["physical id"], entry["core id"]) for entry in entries if {"physical id", "core id"} <= entry.keys()
    }
    return Cpu(
        model=first.get("model name", platform.processor()),
        features=tuple(name for name, ways in _FEATURES.items() if any(flags.issuperset(way.split()) for way in ways)),
        cores=len(cores) or None,
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
