"""nvcc, the host compiler and the CUTLASS headers of this machine.

Invariant: what is returned serves; what is missing, too old, too new or does not answer raises `ToolchainError`, which says where was
looked and what to do. A tool that the user named in the environment is taken or refused, never passed over for another. CUTLASS's
Python package is not imported: it needs packages that we do not, and its headers are all that is used.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda.kernel.config import Arch
from qsync_fx.errors import ToolchainError

Version = tuple[int, ...]

OLDEST_NVCC: Final = (12, 4)
"""The first whose PTX has everything that CUTLASS 4 uses on Hopper."""

OLDEST_GCC: Final = (7, 5)
"""What CUTLASS 4 asks for in its README."""

NEWEST_GCC: Final[dict[Version, int]] = {
    (12, 4): 13,
    (12, 5): 13,
    (12, 6): 13,
    (12, 8): 14,
    (12, 9): 14,
    (13, 0): 15,
    (13, 1): 15,
}
"""The newest GCC that each nvcc accepts (CUDA Installation Guide for Linux, host compiler support). Others decide for themselves."""

OLDEST_CUTLASS: Final = (4, 0)

USUAL: Final = "/usr/local/cuda/bin"
"""Where toolkits are that nobody has put anywhere else."""

BESIDE: Final = Path(__file__).resolve().parents[3] / "third_party" / "cutlass"
"""Where CUTLASS may lie in a source tree that travels to a machine without a network."""


@dataclass(frozen=True)
class Program:
    """A program and the version it tells."""

    path: Path
    version: Version

    def __str__(self) -> str:
        return f"{self.path} {dotted(self.version)}"


@dataclass(frozen=True)
class Headers:
    """CUTLASS: `folders` are what nvcc searches; without any for sources that include nothing of it."""

    folders: tuple[Path, ...] = ()
    version: Version = ()


@dataclass(frozen=True)
class Toolchain:
    """All that compiling takes.

    Attributes:
        nvcc: what compiles device code: nvcc, or the library of NVRTC where there is a `toolkit`.
        host: what compiles host code.
        toolkit: folders of CUDA's headers, for NVRTC; nvcc has its own.
    """

    nvcc: Program
    host: Program
    cutlass: Headers
    toolkit: tuple[Path, ...] = ()


def toolchain(arch: Arch | None = None, templates: bool = True) -> Toolchain:
    """Returns the tools of this machine.

    Args:
        arch: what is to be compiled for, if that is known.
        templates: whether it is made of CUTLASS's templates, as products are; quantizers and copies are plain CUDA.

    Raises:
        ToolchainError: one is missing or of a version that does not serve.
    """
    if arch == "sm_70" and not _compiles_for_volta():
        from qsync_fx.backend.cuda.tools import nvrtc

        return nvrtc.tools()
    compiler = nvcc()
    return Toolchain(compiler, host_compiler(compiler), cutlass() if templates else Headers())


def _compiles_for_volta() -> bool:
    """Whether nvcc compiles for sm_70; CUDA 13 has dropped it. One that the user named and that does not serve raises, as elsewhere."""
    if environment.text("QSYNC_NVRTC"):
        return False
    try:
        return nvcc().version < (13,)
    except ToolchainError:
        if environment.text("QSYNC_NVCC", "CUDACXX"):
            raise
        return False


def nvcc() -> Program:
    """Returns nvcc: $QSYNC_NVCC, $CUDACXX, $CUDA_HOME/bin, $CUDA_PATH/bin, PATH, /usr/local/cuda/bin, or that of a pip wheel."""
    unfit: list[str] = []
    for name in ("QSYNC_NVCC", "CUDACXX"):
        if named := environment.text(name):
            found = _program(shutil.which(named), ("--version",), r"release [\d.]+, V([\d.]+)")
            if found is None:
                raise ToolchainError(
                    "this is no nvcc that runs", where=f"{name}={named}", do=f"correct {name}, or unset it"
                )
            if found.version < OLDEST_NVCC:
                raise _too_old("nvcc", found, OLDEST_NVCC, f"correct {name}, or unset it")
            return found
    for path in dict.fromkeys(_nvcc_places()):
        found = _program(path, ("--version",), r"release [\d.]+, V([\d.]+)")
        if found is not None and found.version >= OLDEST_NVCC:
            return found
        unfit.append(f"{path} is {dotted(found.version)}" if found else f"{path} does not run")
    raise ToolchainError(
        f"CUDA kernels cannot be compiled: no nvcc of {dotted(OLDEST_NVCC)} or later"
        + (f" ({'; '.join(unfit)})" if unfit else ""),
        where="QSYNC_NVCC, CUDACXX, CUDA_HOME, PATH, /usr/local/cuda/bin and the wheel nvidia-cuda-nvcc",
        do="install the CUDA toolkit, or name its nvcc in QSYNC_NVCC; on a machine that has none, use kernels that another one has "
        "built: qsync kernels build --output DIR there, QSYNC_KERNELS_PATH=DIR here",
    )


def _nvcc_places() -> Iterator[str]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if (home := environment.text(name)) and (path := shutil.which("nvcc", path=str(Path(home) / "bin"))):
            yield path
    for folder in (None, USUAL, *map(str, wheel_folders("bin"))):
        if path := shutil.which("nvcc", path=folder):
            yield path


def wheel_folders(name: str) -> list[Path]:
    """Returns the folders called `name` ("bin", "lib") of NVIDIA's pip wheels, which share one place for each major version."""
    homes = [place / cuda for place in package_folders("nvidia") for cuda in ("cu13", "cu12")]
    return [home / name for home in homes if (home / name).is_dir()]


def package_folders(name: str) -> list[Path]:
    """Returns where a top-level package lies, without importing it; nothing where it is not installed."""
    spec = importlib.util.find_spec(name)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def host_compiler(compiler: Program | None) -> Program:
    """Returns what host code is compiled with: $NVCC_CCBIN, $CUDAHOSTCXX, g++, or the newest `g++-N` that nvcc accepts, if one is given."""
    newest = NEWEST_GCC.get(compiler.version[:2]) if compiler else None
    for name in ("NVCC_CCBIN", "CUDAHOSTCXX"):
        if named := environment.text(name):
            found = _host(str(Path(named) / "g++") if Path(named).is_dir() else named)
            if found is None:
                raise ToolchainError(
                    "this is no C++ compiler that runs", where=f"{name}={named}", do=f"correct {name}, or unset it"
                )
            return found
    found = _host("g++") or _host("c++")
    if found is not None and compiler is not None and newest is not None and found.version[0] > newest:
        older = (_host(f"g++-{number}") for number in range(newest, OLDEST_GCC[0], -1))
        fit = next((program for program in older if program), None)
        if fit is None:
            raise ToolchainError(
                f"nvcc {dotted(compiler.version)} accepts GCC up to {newest}, and this one is {dotted(found.version)}",
                where=str(found.path),
                do=f"install g++-{newest} (it is found by that name), or name a compiler in NVCC_CCBIN",
            )
        found = fit
    if found is None:
        raise ToolchainError(
            "CUDA kernels cannot be compiled: this takes a C++ compiler, and there is none",
            where="NVCC_CCBIN, CUDAHOSTCXX, and g++ in PATH",
            do="install g++ (on Debian: apt-get install g++), or name a compiler in NVCC_CCBIN",
        )
    if found.version < OLDEST_GCC:
        raise _too_old("the host compiler", found, OLDEST_GCC, "install a later g++, or name one in NVCC_CCBIN")
    return found


def _host(name: str) -> Program | None:
    return _program(shutil.which(name), ("-dumpfullversion", "-dumpversion"), r"^([\d.]+)\s*$")


def cutlass() -> Headers:
    """Returns the headers of CUTLASS: $QSYNC_CUTLASS_PATH, $CUTLASS_PATH, the wheel nvidia-cutlass, or third_party/cutlass."""
    for name in ("QSYNC_CUTLASS_PATH", "CUTLASS_PATH"):
        if named := environment.text(name):
            root = Path(os.path.abspath(named))
            found = next((h for h in map(_headers, (root, root / "source", root.parent)) if h), None)
            if found is None:
                raise ToolchainError(
                    "this folder holds no CUTLASS: it has no include/cutlass/version.h beside tools/util/include",
                    where=f"{name}={named}",
                    do=f"set {name} to a checkout of CUTLASS {dotted(OLDEST_CUTLASS)} or later, or unset it",
                )
            return _checked(found)
    for root in (*(folder / "source" for folder in package_folders("cutlass_library")), BESIDE):
        if found := _headers(root):
            return _checked(found)
    raise ToolchainError(
        "the headers of CUTLASS are missing",
        where=f"QSYNC_CUTLASS_PATH, CUTLASS_PATH, the wheel nvidia-cutlass, and {BESIDE}",
        do="pip install --no-deps nvidia-cutlass==4.2.0.0",
    )


def _headers(root: Path) -> Headers | None:
    folders = (root / "include", root / "tools" / "util" / "include")
    header = folders[0] / "cutlass" / "version.h"
    if not header.is_file() or not folders[1].is_dir():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    numbers = [re.search(rf"#define CUTLASS_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    return Headers(folders, tuple(int(number[1]) for number in numbers if number))


def _checked(headers: Headers) -> Headers:
    if headers.version < OLDEST_CUTLASS:
        raise ToolchainError(
            f"CUTLASS {dotted(headers.version)} is too old: {dotted(OLDEST_CUTLASS)} or later is needed",
            where=str(headers.folders[0]),
            do="pip install --no-deps nvidia-cutlass==4.2.0.0, and unset QSYNC_CUTLASS_PATH and CUTLASS_PATH",
        )
    return headers


def tool(name: str, *beside: Path) -> Path | None:
    """Returns a program of the CUDA toolkit other than nvcc: from folders given, PATH, pip wheels, or those that Triton brings along."""
    brought = [place / "backends/nvidia/bin" for place in package_folders("triton")]
    for folder in (*beside, None, Path(USUAL), *wheel_folders("bin"), *brought):
        if path := shutil.which(name, path=None if folder is None else str(folder)):
            return Path(os.path.abspath(path))
    return None


@functools.cache
def library_folders(compiler: Path) -> tuple[Path, ...]:
    """Returns where the toolkit of this nvcc keeps its libraries. It may be a script that calls the real one, so nvcc is asked."""
    said = subprocess.run(
        [compiler, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, timeout=60, check=False
    )
    top = re.search(r"^#\$ TOP=(.+)$", said.stderr, flags=re.MULTILINE)
    home = Path(top[1].strip()) if top else compiler.resolve().parent.parent
    return tuple(path for path in (home / "lib64", home / "lib", *home.glob("targets/*/lib")) if path.is_dir())


def dotted(version: Version) -> str:
    """Returns a version as people write it."""
    return ".".join(map(str, version))


def _program(path: str | None, arguments: tuple[str, ...], pattern: str) -> Program | None:
    if path is None:
        return None
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        return None
    version = _version(path, arguments, pattern, changed)
    return Program(Path(os.path.abspath(path)), version) if version else None


@functools.cache
def _version(path: str, arguments: tuple[str, ...], pattern: str, changed: int) -> Version | None:
    try:
        said = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    found = re.search(pattern, said, flags=re.MULTILINE)
    return tuple(int(number) for number in found[1].split(".") if number) if found else None


def _too_old(name: str, found: Program, oldest: Version, do: str) -> ToolchainError:
    return ToolchainError(
        f"{name} is {dotted(found.version)}: {dotted(oldest)} or later is needed", where=str(found.path), do=do
    )
