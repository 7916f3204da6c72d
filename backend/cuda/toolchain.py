"""Compilers and headers of this machine: nvcc, host compiler, CUTLASS.

Invariant: a returned tool works. A missing, unsupported or failing tool raises `ToolchainError`
with the searched places and a remedy. A tool that the user names in the environment is used or
rejected, never silently replaced. CUTLASS's Python package is not imported, since it has
dependencies; only its headers are used.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
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
    (12, 4): 13,
    (12, 5): 13,
    (12, 6): 13,
    (12, 8): 14,
    (12, 9): 14,
    (13, 0): 15,
    (13, 1): 15,
}
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
    """Return the tools of this machine.

    Args:
        templates: whether the unit uses CUTLASS templates, as GEMMs and convolutions do; quantizers
            and copies are plain CUDA.

    Raises:
        ToolchainError: a tool is missing or has an unsupported version.
    """
    compiler = nvcc()
    return Toolchain(compiler, host_compiler(compiler), cutlass() if templates else Headers())


def nvcc() -> ToolProgram:
    """Return nvcc from the environment, PATH, the default folder or a pip wheel.

    The order is $QSYNC_NVCC, $CUDACXX, $CUDA_HOME/bin, $CUDA_PATH/bin, PATH, /usr/local/cuda/bin,
    wheels.
    """
    unfit: list[str] = []
    for name in ("QSYNC_NVCC", "CUDACXX"):
        if named := environment.text(name):
            result = _program(shutil.which(named), ("--version",), r"release [\d.]+, V([\d.]+)")
            if result is None:
                raise ToolchainError(
                    "this is not a working nvcc",
                    where=f"{name}={named}",
                    do=f"correct {name}, or unset it",
                )
            if result.version < OLDEST_NVCC:
                raise _too_old("nvcc", result, OLDEST_NVCC, f"correct {name}, or unset it")
            return result
    for path in dict.fromkeys(_nvcc_places()):
        result = _program(path, ("--version",), r"release [\d.]+, V([\d.]+)")
        if result is not None and result.version >= OLDEST_NVCC:
            return result
        fault = f"is {dotted(result.version)}" if result else "does not run"
        unfit.append(f"{path} {fault}")
    others = f" ({'; '.join(unfit)})" if unfit else ""
    raise ToolchainError(
        f"CUDA kernels cannot be compiled: no nvcc of {dotted(OLDEST_NVCC)} or later{others}",
        where="QSYNC_NVCC, CUDACXX, CUDA_HOME, PATH, /usr/local/cuda/bin and the wheel "
        "nvidia-cuda-nvcc",
        do="install the CUDA toolkit, or set QSYNC_NVCC to its nvcc; on a machine without nvcc, "
        "use kernels from another machine: run `qsync kernels build --output DIR` there, and "
        "set QSYNC_KERNELS_PATH=DIR here",
    )


def _nvcc_places() -> Iterator[str]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if (home := environment.text(name)) and (
            path := shutil.which("nvcc", path=str(Path(home) / "bin"))
        ):
            yield path
    for folder in (None, USUAL, *map(str, wheel_folders("bin"))):
        if path := shutil.which("nvcc", path=folder):
            yield path


def wheel_folders(name: str) -> list[Path]:
    """Return the `name` folders ("bin", "lib") of NVIDIA's pip wheels, one per CUDA version."""
    homes = [place / cuda for place in package_folders("nvidia") for cuda in ("cu13", "cu12")]
    return [home / name for home in homes if (home / name).is_dir()]


def package_folders(name: str) -> list[Path]:
    """Return the folders of a top-level package without importing it; [] if not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or ()]


def host_compiler(compiler: ToolProgram) -> ToolProgram:
    """Return the host compiler: $NVCC_CCBIN, $CUDAHOSTCXX, g++ or c++.

    If `compiler` does not accept this GCC, it is the newest `g++-N` that it accepts.
    """
    for name in ("NVCC_CCBIN", "CUDAHOSTCXX"):
        if named := environment.text(name):
            result = _host(str(Path(named) / "g++") if Path(named).is_dir() else named)
            if result is None:
                raise ToolchainError(
                    "this is not a working C++ compiler",
                    where=f"{name}={named}",
                    do=f"correct {name}, or unset it",
                )
            return result
    result = _host("g++") or _host("c++")
    newest = NEWEST_GCC.get(compiler.version[:2], math.inf)
    if result is not None and result.version[0] > newest:
        assert isinstance(newest, int)
        older = (_host(f"g++-{number}") for number in range(newest, OLDEST_GCC[0], -1))
        fit = next((program for program in older if program), None)
        if fit is None:
            raise ToolchainError(
                f"nvcc {dotted(compiler.version)} accepts GCC up to {newest}, and the version of "
                f"this one is {dotted(result.version)}",
                where=str(result.path),
                do=f"install g++-{newest} (it is found by this name), or set NVCC_CCBIN to a "
                "compiler",
            )
        result = fit
    if result is None:
        raise ToolchainError(
            "CUDA kernels cannot be compiled: no C++ compiler was found",
            where="NVCC_CCBIN, CUDAHOSTCXX, and g++ in PATH",
            do="install g++ (on Debian: apt-get install g++), or set NVCC_CCBIN to a compiler",
        )
    if result.version < OLDEST_GCC:
        raise _too_old(
            "the host compiler",
            result,
            OLDEST_GCC,
            "install a later g++, or set NVCC_CCBIN to one",
        )
    return result


def _host(name: str) -> ToolProgram | None:
    return _program(shutil.which(name), ("-dumpfullversion", "-dumpversion"), r"^([\d.]+)\s*$")


def cutlass() -> Headers:
    """Return the headers of CUTLASS.

    The order is $QSYNC_CUTLASS_PATH, $CUTLASS_PATH, the wheel nvidia-cutlass, third_party/cutlass.
    """
    for name in ("QSYNC_CUTLASS_PATH", "CUTLASS_PATH"):
        if named := environment.text(name):
            root = Path(os.path.abspath(named))
            result = next(
                (h for h in map(_headers, (root, root / "source", root.parent)) if h), None
            )
            if result is None:
                raise ToolchainError(
                    "this folder does not contain CUTLASS: include/cutlass/version.h or "
                    "tools/util/include is missing",
                    where=f"{name}={named}",
                    do=f"set {name} to a checkout of CUTLASS {dotted(OLDEST_CUTLASS)} or later, "
                    "or unset it",
                )
            return _checked(result)
    for root in (*(folder / "source" for folder in package_folders("cutlass_library")), BESIDE):
        if result := _headers(root):
            return _checked(result)
    raise ToolchainError(
        "the CUTLASS headers were not found",
        where=f"QSYNC_CUTLASS_PATH, CUTLASS_PATH, the wheel nvidia-cutlass, and {BESIDE}",
        do="pip install --no-deps nvidia-cutlass==4.2.0.0",
    )


def _headers(root: Path) -> Headers | None:
    folders = (root / "include", root / "tools" / "util" / "include")
    header = folders[0] / "cutlass" / "version.h"
    if not header.is_file() or not folders[1].is_dir():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = [
        re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    return Headers(folders, tuple(int(number[1]) for number in numbers if number))


def _checked(headers: Headers) -> Headers:
    if headers.version < OLDEST_CUTLASS:
        raise ToolchainError(
            f"CUTLASS {dotted(headers.version)} is too old: {dotted(OLDEST_CUTLASS)} or later is "
            "needed",
            where=str(headers.folders[0]),
            do="pip install --no-deps nvidia-cutlass==4.2.0.0, and unset QSYNC_CUTLASS_PATH and "
            "CUTLASS_PATH",
        )
    return headers


def tool(name: str, *neighbours: Path) -> Path | None:
    """Return a CUDA tool except nvcc, from `neighbours`, PATH, the toolkit, wheels or Triton."""
    brought = [place / "backends/nvidia/bin" for place in package_folders("triton")]
    for folder in (*neighbours, None, Path(USUAL), *wheel_folders("bin"), *brought):
        if path := shutil.which(name, path=None if folder is None else str(folder)):
            return Path(os.path.abspath(path))
    return None


@functools.cache
def library_folders(compiler: Path) -> tuple[Path, ...]:
    """Return the library folders of the toolkit of an nvcc.

    nvcc itself reports the toolkit, since it may be a script that calls another nvcc.
    """
    text = subprocess.run(
        [compiler, "--dryrun", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    top = re.search(r"^#\$ TOP=(.+)$", text.stderr, flags=re.MULTILINE)
    home = Path(top[1].strip()) if top else compiler.resolve().parent.parent
    return tuple(
        path
        for path in (home / "lib64", home / "lib", *home.glob("targets/*/lib"))
        if path.is_dir()
    )


def dotted(version: Version) -> str:
    """Return a version as dotted text."""
    return ".".join(map(str, version))


def _program(path: str | None, arguments: tuple[str, ...], pattern: str) -> ToolProgram | None:
    if path is None:
        return None
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        return None
    version = _version(path, arguments, pattern, changed)
    return ToolProgram(Path(os.path.abspath(path)), version) if version else None


@functools.cache
def _version(path: str, arguments: tuple[str, ...], pattern: str, changed: int) -> Version | None:
    try:
        text = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    result = re.search(pattern, text, flags=re.MULTILINE)
    return tuple(int(number) for number in result[1].split(".") if number) if result else None


def _too_old(name: str, result: ToolProgram, oldest: Version, do: str) -> ToolchainError:
    return ToolchainError(
        f"{name} is {dotted(result.version)}: {dotted(oldest)} or later is needed",
        where=str(result.path),
        do=do,
    )
