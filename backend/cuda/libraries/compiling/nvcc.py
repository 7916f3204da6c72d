"""One run of nvcc, or of what takes its place for sm_70 (`nvrtc`): its command line, its process, and the error when it fails.

Invariant: the command that an error shows is the one that ran, and can be run again: the source and the whole output stay in a folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda.kernel.hardware import FORWARD
from qsync_fx.backend.cuda.libraries.compiling import budget
from qsync_fx.backend.cuda.libraries.keys import TEMPLATES
from qsync_fx.backend.cuda.source.unit import Unit
from qsync_fx.backend.cuda.tools import nvrtc
from qsync_fx.backend.cuda.tools.toolchain import Toolchain, dotted, library_folders
from qsync_fx.errors import KernelError, ToolchainError

FLAGS: Final = (
    "-std=c++17",
    "-O3",
    # Assertions in device code make ptxas serialize Hopper's matrix products (C7510).
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-shared",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    # What is missing shows now, not when the library is loaded.
    "-Xlinker=-z,defs",
    "-Xptxas=-v",
)
_SHOWN_LINES: Final = 15


def command(unit: Unit, tools: Toolchain) -> list[str]:
    """Returns the command that compiles NAME.cu in the current folder to NAME.so; raises `KernelError` for what NVRTC does not take."""
    if tools.toolkit:
        if unit.interface != "gemm":
            raise KernelError(
                "without an nvcc of CUDA 12 there are products for sm_70 alone: torch does the rest",
                where=unit.name,
                do="install CUDA 12.4 to 12.9 and set QSYNC_NVCC to its nvcc, if this is wanted",
            )
        return nvrtc.command(unit.name, unit.arch, tools, (TEMPLATES,))
    number = unit.arch.removeprefix("sm_")
    code = f"[sm_{number},compute_{number}]" if unit.arch in FORWARD else f"sm_{number}"
    includes = [f"-I{folder}" for folder in (TEMPLATES, *tools.cutlass.folders)]
    target = f"-gencode=arch=compute_{number},code={code}"
    head = [str(tools.nvcc.path), "-ccbin", str(tools.host.path), *FLAGS, target, *_runtime(tools.nvcc.path)]
    return [*head, *includes, "-o", f"{unit.name}.so", f"{unit.name}.cu"]


def flags(tools: Toolchain) -> tuple[str, ...]:
    """Returns the flags of `command`, without paths."""
    return nvrtc.FLAGS if tools.toolkit else (*FLAGS, f"PTX for {', '.join(FORWARD)}")


def described(tools: Toolchain) -> str:
    """Returns what compiles, with versions."""
    name = "NVRTC" if tools.toolkit else "nvcc"
    templates = f", CUTLASS {dotted(tools.cutlass.version)}" if tools.cutlass.folders else ""
    return f"{name} {dotted(tools.nvcc.version)}, host compiler {dotted(tools.host.version)}{templates}"


def _runtime(compiler: Path) -> list[str]:
    """Returns how to link CUDA's runtime, one for all libraries and torch. Pip wheels hold it under its full name only."""
    folders = library_folders(compiler)
    if not any((folder / "libcudart.so").exists() for folder in folders):
        for library in (path for folder in folders for path in sorted(folder.glob("libcudart.so.*"))):
            return ["-cudart", "none", f"-Xlinker={library}"]
    return ["-cudart", "shared"]


def start(unit: Unit, work: Path, tools: Toolchain) -> subprocess.Popen[bytes]:
    """Starts nvcc on a unit in the folder `work`, where its output goes to the file `log`; raises `KernelError` where that fails."""
    if not re.fullmatch(r"[A-Za-z0-9_]{1,200}", unit.name):
        raise KernelError("this name of a unit makes no file name", where=unit.name, do="use letters, digits and _")
    arguments = command(unit, tools)
    try:
        (work / f"{unit.name}.cu").write_text(unit.source, encoding="utf-8")
        (work / "tmp").mkdir()
        with open(work / "log", "wb") as log:
            # A group of its own, so that what nvcc starts can be ended with it; its temporary files go where ours go.
            return subprocess.Popen(
                arguments,
                cwd=work,
                env=environment.child_environment(TMPDIR=str(work / "tmp")),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
    except OSError as error:
        raise KernelError(
            f"compiling cannot start: {error}", where=shlex.join(arguments), do="check that the disk has space"
        ) from error


def failure(unit: Unit, work: Path, status: int, tools: Toolchain, kept: Path) -> ToolchainError:
    """Returns the error for a compiler that has ended with `status`; source and output move from `work` to the folder `kept`."""
    report = (work / "log").read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError):
        kept.mkdir(exist_ok=True)
        os.replace(work / f"{unit.name}.cu", kept / f"{unit.name}.cu")
        os.replace(work / "log", kept / f"{unit.name}.log")
    last = "\n".join(f"  | {line}" for line in report.strip().splitlines()[-_SHOWN_LINES:])
    of_the_source = False
    if status < 0 or re.search(r"\bKilled\b|signal 9|out of memory|Cannot allocate", report):
        gigabytes = budget.need(unit) / 1e9
        do = f"it was killed, mostly for lack of memory (this takes about {gigabytes:.1f} GB): set QSYNC_BUILD_JOBS=1"
    elif "unsupported GNU version" in report or "unsupported clang version" in report:
        do = "name a host compiler that this nvcc accepts in NVCC_CCBIN"
    elif "No space left" in report:
        do = "set QSYNC_CACHE_DIR to a folder on a disk with space"
    else:
        of_the_source = True
        do = f"the whole output is in {kept / unit.name}.log, the source beside it"
    error = ToolchainError(
        f"{'NVRTC' if tools.toolkit else 'nvcc'} failed with status {status} on {unit.name}"
        + (f"; its last lines:\n{last}" if last else " and said nothing"),
        where=f"cd {shlex.quote(str(kept))} && {shlex.join(command(unit, tools))}",
        do=do,
    )
    error.output, error.of_the_source = report, of_the_source
    return error
