"""How many compilers may run at once: as many as there are cores and memory for.

Invariant: one may always run. Compiling a kernel of CUTLASS 3 takes 3.3 to 4.4 GB; a machine that swaps, or kills processes for lack
of memory, compiles slower than one that waits.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.errors import OptionError

HEAVY: Final = 4_600_000_000
LIGHT: Final = 1_300_000_000
"""Bytes that nvcc takes for a unit, heavy or not; measured with nvcc 13.0."""


def need(unit: Unit) -> int:
    """Returns how many bytes of memory compiling a unit takes."""
    return HEAVY if unit.heavy else LIGHT


def jobs(given: int | None = None) -> int:
    """Returns how many compilers may run as far as cores go: the number given, $QSYNC_BUILD_JOBS, or this process's share of the cores.

    Raises:
        OptionError: the number is no whole number from 1.
    """
    if given is not None:
        if given < 1:
            raise OptionError(f"{given} compilers cannot run at once", where="jobs", do="give a number from 1")
        return given
    if (number := environment.count("QSYNC_BUILD_JOBS")) is not None:
        return number
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes())


def processes() -> int:
    """Returns how many processes of a training job share this machine, as torchrun tells them."""
    return environment.launcher_number("LOCAL_WORLD_SIZE") or 1


def memory() -> int:
    """Returns how many bytes of memory are free for use, by the machine and by the limits of this process's control group."""
    free = [_machine(), *(_group(Path("/sys/fs/cgroup", part)) for part in _groups())]
    return min((value for value in free if value is not None), default=HEAVY)


def _machine() -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(Path("/proc/meminfo")), flags=re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _groups() -> list[str]:
    """Returns the paths of this process's control group (version 2) and those around it, which limit it too."""
    found = re.search(r"^0::/(.*)$", _text(Path("/proc/self/cgroup")), flags=re.MULTILINE)
    parts = found[1].split("/") if found and found[1] else []
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]


def _group(folder: Path) -> int | None:
    limit, used = (_text(folder / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None
    # What the kernel can drop at once is no use of memory: compiling reads many files.
    cached = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), flags=re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
