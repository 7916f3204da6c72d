"""Compilers and headers of this machine: nvcc, host compiler, CUTLASS.

Invariant: a returned tool works. A tool that the user names in the environment is used or rejected,
never silently replaced. Of CUTLASS's Python package only the headers are used.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.errors import ToolchainError

Version = tuple[int, ...]

OLDEST_NVCC: Final = (12, 4)
"""The first nvcc whose PTX has all features that CUTLASS 4 uses on Hopper."""

OLDEST_GCC: Final = (7, 5)
"""Requirement of CUTLASS 4 (README)."""

NEWEST_GCC: Final[dict[Version, int]] = {
    (12, 4): 13, (12, 5): 13, (12, 6): 13, (12, 8): 14, (12, 9): 14, (13, 0): 15, (13, 1): 15,
}  # fmt: skip
"""The newest GCC that each nvcc accepts (CUDA Installation Guide for Linux, host compiler support).

Other versions of nvcc check the compiler themselves.
"""

OLDEST_CUTLASS: Final = (4, 0)

USUAL: Final = "/usr/local/cuda/bin"
"""Default folder of CUDA toolkits."""

BESIDE: Final = Path(__file__).resolve().parents[3] / "third_party" / "cutlass"
"""CUTLASS in a source tree, for machines without a network."""


@dataclass(frozen=True)
class ToolProgram:
    """Program and its version."""

    path: Path
    version: Version

    def __str__(self) -> str:
        return f"{self.path} {dotted(self.version)}"


@dataclass(frozen=True)
class Headers:
    """CUTLASS headers: include folders and version; empty for sources without CUTLASS."""

    folders: tuple[Path, ...] = ()
    version: Version = ()


@dataclass(frozen=True)
class Toolchain:
    """Tools that compile a unit."""

    nvcc: ToolProgram
    host: ToolProgram
    cutlass: Headers


def toolchain(templates: bool = True) -> Toolchain:
    """Return the tools of this machine, those for units of CUTLASS templates or of plain CUDA.

    Raise `ToolchainError` if a tool is missing or has an unsupported version.
    """
    compiler = nvcc()
    return Toolchain(compiler, host_compiler(compiler), cutlass() if templates else Headers())


def nvcc() -> ToolProgram:
    """Return nvcc from the environment, PATH, the default folder or a pip wheel, in this order."""
    for name in ("QSYNC_NVCC", "CUDACXX"):
        if named := environment.text(name):
            return _checked(_named(name, named, _nvcc(named)), OLDEST_NVCC, name)
    homes = filter(None, map(environment.text, ("CUDA_HOME", "CUDA_PATH")))
    folders = (*(f"{home}/bin" for home in homes), None, USUAL, *wheel_folders("bin"))
    unfit = ""
    paths = (shutil.which("nvcc", path=folder and str(folder)) for folder in folders)
    for path in dict.fromkeys(filter(None, paths)):
        result = _nvcc(path)
        if result is None:
            unfit += f"; {path} does not run"
        elif result.version < OLDEST_NVCC:
            unfit += f"; {path} is {dotted(result.version)}"
        else:
            return result
    raise ToolchainError(
        f"CUDA kernels cannot be compiled: no nvcc of {dotted(OLDEST_NVCC)} or later{unfit}",
        where="QSYNC_NVCC, CUDACXX, CUDA_HOME, PATH, /usr/local/cuda/bin and the wheel "
        "nvidia-cuda-nvcc",
        do="install the CUDA toolkit, or set QSYNC_NVCC to its nvcc; on a machine without nvcc, "
        "use kernels from another machine: run `qsync kernels build --output DIR` there, and "
        "set QSYNC_KERNELS_PATH=DIR here",
    )


def _nvcc(path: str) -> ToolProgram | None:
    return _program(path, ("--version",), r"release [\d.]+, V([\d.]+)")


def _named(name: str, value: str, result: ToolProgram | None) -> ToolProgram:
    """Return the program that the user names in a variable; raise if it does not run."""
    if result is None:
        raise ToolchainError(
            "this is not a working compiler",
            where=f"{name}={value}",
            do=f"correct {name}, or unset it",
        )
    return result


def _checked(result: ToolProgram, oldest: Version, variable: str) -> ToolProgram:
    if result.version < oldest:
        raise ToolchainError(
            f"this compiler is {dotted(result.version)}: {dotted(oldest)} or later is needed",
            where=str(result.path),
            do=f"install a later version, or correct {variable}",
        )
    return result


def wheel_folders(name: str) -> list[Path]:
    """Return the `name` folders ("bin", "lib") of NVIDIA's pip wheels, one per CUDA version."""
    homes = [place / cuda for place in package_folders("nvidia") for cuda in ("cu13", "cu12")]
    return [home / name for home in homes if (home / name).is_dir()]


def package_folders(name: str) -> list[Path]:
    """Return the folders of a top-level package without importing it; [] if not installed."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def host_compiler(compiler: ToolProgram) -> ToolProgram:
    """Return the host compiler: $NVCC_CCBIN, $CUDAHOSTCXX, g++ or c++.

    If `compiler` does not accept this GCC, it is the newest `g++-N` that it accepts.
    """
    for name in ("NVCC_CCBIN", "CUDAHOSTCXX"):
        if named := environment.text(name):
            return _named(name, named, _host(f"{named}/g++") or _host(named))
    result = _host("g++") or _host("c++")
    if result is None:
        raise ToolchainError(
            "CUDA kernels cannot be compiled: no C++ compiler was found",
            where="NVCC_CCBIN, CUDAHOSTCXX, and g++ in PATH",
            do="install g++ (on Debian: apt-get install g++), or set NVCC_CCBIN to a compiler",
        )
    newest = NEWEST_GCC.get(compiler.version[:2], result.version[0])
    if result.version[0] > newest:
        older = (_host(f"g++-{number}") for number in range(newest, OLDEST_GCC[0], -1))
        if fit := next(filter(None, older), None):
            return fit
        raise ToolchainError(
            f"nvcc {dotted(compiler.version)} accepts GCC up to {newest}, and the version of this "
            f"one is {dotted(result.version)}",
            where=str(result.path),
            do=f"install g++-{newest} (it is found by this name), or set NVCC_CCBIN to a compiler",
        )
    return _checked(result, OLDEST_GCC, "NVCC_CCBIN")


def _host(name: str) -> ToolProgram | None:
    return _program(name, ("-dumpfullversion", "-dumpversion"), r"^([\d.]+)\s*$")


def cutlass() -> Headers:
    """Return the headers of CUTLASS, of the environment, the wheel or third_party/cutlass."""
    roots = [*(folder / "source" for folder in package_folders("cutlass_library")), BESIDE]
    where = f"QSYNC_CUTLASS_PATH, CUTLASS_PATH, the wheel nvidia-cutlass, and {BESIDE}"
    for name in ("CUTLASS_PATH", "QSYNC_CUTLASS_PATH"):
        if named := environment.text(name):
            root = Path(os.path.abspath(named))
            roots, where = [root, root / "source", root.parent], f"{name}={named}"
    result = next(filter(None, map(_headers, roots)), None)
    if result is None:
        raise ToolchainError(
            "the CUTLASS headers were not found (include/cutlass/version.h and tools/util/include)",
            where=where,
            do="pip install --no-deps nvidia-cutlass==4.2.0.0",
        )
    if result.version < OLDEST_CUTLASS:
        version, oldest = dotted(result.version), dotted(OLDEST_CUTLASS)
        raise ToolchainError(
            f"CUTLASS {version} is too old: {oldest} or later is needed",
            where=str(result.folders[0]),
            do="pip install --no-deps nvidia-cutlass==4.2.0.0, and unset QSYNC_CUTLASS_PATH and "
            "CUTLASS_PATH",
        )
    return result


def _headers(root: Path) -> Headers | None:
    folders = (root / "include", root / "tools" / "util" / "include")
    header = folders[0] / "cutlass" / "version.h"
    if not header.is_file() or not folders[1].is_dir():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text)
    return Headers(folders, tuple(map(int, numbers)))


def tool(name: str, *neighbours: Path) -> Path | None:
    """Return a CUDA tool except nvcc, from `neighbours`, PATH, the toolkit, wheels or Triton."""
    brought = [place / "backends/nvidia/bin" for place in package_folders("triton")]
    for folder in (*neighbours, None, USUAL, *wheel_folders("bin"), *brought):
        if path := shutil.which(name, path=folder and str(folder)):
            return Path(os.path.abspath(path))
    return None


@functools.cache
def library_folders(compiler: Path) -> tuple[Path, ...]:
    """Return the library folders of the toolkit that an nvcc, maybe a script, reports."""
    command = [str(compiler), "--dryrun", "-x", "cu", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", text.stderr, flags=re.MULTILINE)
    home = Path(top[1].strip()) if top else compiler.resolve().parent.parent
    folders = (home / "lib64", home / "lib", *home.glob("targets/*/lib"))
    return tuple(path for path in folders if path.is_dir())


def dotted(version: Version) -> str:
    """Return a version as dotted text."""
    return ".".join(map(str, version))


def _program(name: str, arguments: tuple[str, ...], pattern: str) -> ToolProgram | None:
    """Return a program in PATH, or at a path; None if it does not report a version."""
    path = shutil.which(name)
    if path is None:
        return None
    if version := _version(path, arguments, pattern, os.stat(path).st_mtime_ns):
        return ToolProgram(Path(os.path.abspath(path)), version)
    return None


@functools.cache
def _version(path: str, arguments: tuple[str, ...], pattern: str, changed: int) -> Version | None:
    try:
        text = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    if result := re.search(pattern, text, flags=re.MULTILINE):
        return tuple(map(int, result[1].split(".")))
    return None
