"""Compilers and headers of this machine: nvcc, host compiler, CUTLASS; for sm_70 also NVRTC.

NVRTC of CUDA 12 compiles for sm_70 (V100), which nvcc of CUDA 13 does not support: `pip install
'qsync-fx[volta]'`. This file is also the program that then replaces nvcc, see `main`.

Invariant: a returned tool works. A missing, unsupported or failing tool raises `ToolchainError`
with the searched places and a remedy. A tool that the user names in the environment is used or
rejected, never silently replaced. CUTLASS's Python package is not imported, since it has
dependencies; only its headers are used.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda.kernel_config import Arch
from qsync_fx.errors import ToolchainError

DEVICE_FLAGS = ("-std=c++17", "-default-device", "-DNDEBUG", "--ptxas-options=-v")
HOST_FLAGS = (
    "-std=c++17",
    "-O2",
    "-fpermissive",
    "-w",
    "-DNDEBUG",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
)
LINKED = ("-Wl,-z,defs", "-ldl")

# NVRTC has no standard headers of the host.
_STANDARD = {
    name: (
        "#pragma once\n"
        f"#include <cuda/std/{name}>\n"
        "namespace std { using namespace cuda::std; }\n"
    )
    for name in ("cstdint", "limits", "type_traits")
}
_FIRST_PARAMETER = 0x160
"""Offset of a kernel's parameters in constant bank 0, for sm_70 to sm_89."""


class Failed(Exception):
    """Compilation error, printed before the program exits with status 1."""


def machine_code(library: str, name: str, arch: str, folders: list[str]) -> tuple[bytes, str]:
    """Return the cubin of NAME.cu and the report of NVRTC and ptxas; raise `Failed`."""
    nvrtc = ctypes.CDLL(library)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(function: str, *arguments: object) -> None:
        status = getattr(nvrtc, function)(*arguments)
        if status:
            raise Failed(f"{function}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    def text(description: str) -> bytes:
        call(f"nvrtcGet{description}Size", program, ctypes.byref(size))
        result = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{description}", program, result)
        return result.raw

    names, texts = _strings(list(_STANDARD)), _strings(list(_STANDARD.values()))
    source = Path(f"{name}.cu").read_bytes()
    call(
        "nvrtcCreateProgram",
        ctypes.byref(program),
        source,
        f"{name}.cu".encode(),
        len(_STANDARD),
        texts,
        names,
    )
    options = [f"-arch={arch}", *DEVICE_FLAGS, *(f"-I{folder}" for folder in folders)]
    failed = None
    try:
        call("nvrtcCompileProgram", program, len(options), _strings(options))
    except Failed as error:
        failed = error
    report = text("ProgramLog").rstrip(b"\0").decode(errors="replace")
    if failed:
        raise Failed(f"{report}\n{failed}")
    return text("CUBIN"), report


def _strings(values: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def host_code(compiler: str, name: str, folders: list[str]) -> None:
    """Compile NAME.cu with NAME.cubin embedded to NAME.so.part; raise `Failed`."""
    includes = [f"-I{folder}" for folder in folders]
    code = f'-DQSYNC_CODE="{name}.cubin"'
    command = [
        compiler,
        "-x",
        "c++",
        *HOST_FLAGS,
        code,
        *includes,
        "-o",
        f"{name}.so.part",
        f"{name}.cu",
        *LINKED,
    ]
    if status := subprocess.run(command, check=False).returncode:
        raise Failed(f"the host compiler ended with status {status}")


def agree(name: str, report: str) -> None:
    """Raise `Failed` if host and device code differ in parameter size.

    The kernel would read invalid parameters.
    """
    banks = {int(size) for size in re.findall(r"(\d+) bytes cmem\[0\]", report)}
    passed = ctypes.CDLL(os.path.abspath(f"{name}.so.part")).qsync_parameters()
    if banks != {_FIRST_PARAMETER + passed}:
        raise Failed(
            f"the machine code has parameters up to byte {sorted(banks)}, the host passes "
            f"{passed} bytes from byte {_FIRST_PARAMETER}"
        )


def main() -> int:
    """Compile a kernel without nvcc; return the exit status.

        python toolchain.py --nvrtc LIBRARY --host COMPILER --arch sm_70 -I FOLDER... NAME

    NAME.cu in the current folder is compiled twice: by NVRTC to NAME.cubin, and by the host
    compiler to NAME.so, which embeds the cubin. NAME.so exists only if both parts agree on the size
    of the kernel's parameters. Diagnostics go to standard error.
    """
    parser = argparse.ArgumentParser(
        description="Compiles NAME.cu to NAME.cubin and NAME.so without nvcc."
    )
    parser.add_argument("--nvrtc", metavar="LIBRARY", required=True)
    parser.add_argument("--host", metavar="COMPILER", required=True)
    parser.add_argument("--arch", required=True)
    parser.add_argument("-I", dest="folders", metavar="FOLDER", action="append", default=[])
    parser.add_argument("name")
    inputs = parser.parse_args()
    try:
        code, report = machine_code(inputs.nvrtc, inputs.name, inputs.arch, inputs.folders)
        print(report, file=sys.stderr, flush=True)
        Path(f"{inputs.name}.cubin").write_bytes(code)
        host_code(inputs.host, inputs.name, inputs.folders)
        agree(inputs.name, report)
        os.replace(f"{inputs.name}.so.part", f"{inputs.name}.so")
    except (Failed, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())


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
    """Tools that compile a unit.

    Attributes:
        nvcc: device compiler: nvcc, or the library of NVRTC if there is a `toolkit`.
        host: host compiler.
        cutlass: CUTLASS headers.
        toolkit: folders of CUDA headers, for NVRTC; nvcc has its own.
    """

    nvcc: ToolProgram
    host: ToolProgram
    cutlass: Headers
    toolkit: tuple[Path, ...] = ()


def toolchain(arch: Arch | None = None, templates: bool = True) -> Toolchain:
    """Return the tools of this machine.

    Args:
        arch: compile target, if known.
        templates: whether the unit uses CUTLASS templates, as GEMMs and convolutions do; quantizers
            and copies are plain CUDA.

    Raises:
        ToolchainError: a tool is missing or has an unsupported version.
    """
    if arch == "sm_70" and not _compiles_for_volta():
        return tools()
    compiler = nvcc()
    return Toolchain(compiler, host_compiler(compiler), cutlass() if templates else Headers())


def _compiles_for_volta() -> bool:
    """Return whether nvcc compiles for sm_70, which CUDA 13 does not support.

    An unsuitable nvcc that the user named raises, as elsewhere.
    """
    if environment.text("QSYNC_NVRTC"):
        return False
    try:
        return nvcc().version < (13,)
    except ToolchainError:
        if environment.text("QSYNC_NVCC", "CUDACXX"):
            raise
        return False


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
        unfit.append(f"{path} is {dotted(result.version)}" if result else f"{path} does not run")
    raise ToolchainError(
        f"CUDA kernels cannot be compiled: no nvcc of {dotted(OLDEST_NVCC)} or later"
        + (f" ({'; '.join(unfit)})" if unfit else ""),
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
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def host_compiler(compiler: ToolProgram | None) -> ToolProgram:
    """Return the host compiler: $NVCC_CCBIN, $CUDAHOSTCXX, g++ or c++.

    If `compiler` does not accept this GCC, it is the newest `g++-N` that it accepts.
    """
    newest = NEWEST_GCC.get(compiler.version[:2]) if compiler else None
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
    if (
        result is not None
        and compiler is not None
        and newest is not None
        and result.version[0] > newest
    ):
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


OLDEST: Final = (12, 4)
FLAGS: Final = (*DEVICE_FLAGS, *HOST_FLAGS, *LINKED)
INSTALL: Final = "pip install 'qsync-fx[volta]'"
_PACKAGES: Final = (
    "nvidia-cuda-nvrtc-cu12, nvidia-cuda-runtime-cu12, nvidia-cuda-cccl-cu12, nvidia-cuda-nvcc-cu12"
)
_HEADERS: Final = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "cuda/std/cstdint")


@dataclass(frozen=True)
class Nvrtc:
    """NVRTC library with its version, and the folders of CUDA headers."""

    library: ToolProgram
    folders: tuple[Path, ...]


def tools() -> Toolchain:
    """Return the tools that compile for sm_70 without nvcc.

    Raises:
        ToolchainError: a tool is missing.
    """
    result = nvrtc()
    return Toolchain(result.library, host_compiler(None), cutlass(), result.folders)


def nvrtc() -> Nvrtc:
    """Return NVRTC from $QSYNC_NVRTC, or from pip wheels.

    The variable names a CUDA 12 toolkit or a folder filled by `pip install --target`.
    """
    if named := environment.text("QSYNC_NVRTC"):
        root = Path(os.path.abspath(Path(named).expanduser()))
        result = _in_wheels(root / "nvidia") or _in_toolkit(root)
        if result is None:
            raise ToolchainError(
                f"this folder does not contain NVRTC of CUDA {dotted(OLDEST)} to 12.9 with the "
                "CUDA headers",
                where=f"QSYNC_NVRTC={named}",
                do=f"set it to a toolkit of CUDA 12, or to a folder with {_PACKAGES}; or unset "
                f"QSYNC_NVRTC and run {INSTALL}",
            )
        return result
    for place in package_folders("nvidia"):
        if result := _in_wheels(place):
            return result
    raise ToolchainError(
        "kernels for sm_70 (V100) cannot be compiled: CUDA 13 has dropped it, and NVRTC of CUDA "
        "12 was not found",
        where=f"QSYNC_NVRTC, and the wheels {_PACKAGES}",
        do=f"run {INSTALL}, or install CUDA 12.4 to 12.9 and set QSYNC_NVCC to its nvcc; without "
        "them, torch computes on such devices",
    )


def command(name: str, arch: str, result: Toolchain, folders: tuple[Path, ...]) -> list[str]:
    """Return the command that compiles NAME.cu in the current folder to NAME.so and NAME.cubin."""
    includes = [f"-I{folder}" for folder in (*folders, *result.cutlass.folders, *result.toolkit)]
    head = [sys.executable, "-I", str(Path(__file__).resolve())]
    return [
        *head,
        "--nvrtc",
        str(result.nvcc.path),
        "--host",
        str(result.host.path),
        "--arch",
        arch,
        *includes,
        name,
    ]


def _in_wheels(place: Path) -> Nvrtc | None:
    headers = (place / name / "include" for name in ("cuda_cccl", "cuda_runtime", "cuda_nvcc"))
    # The file name only contains "12".
    written = (
        path.name.split("-")[1]
        for path in sorted(place.parent.glob("nvidia_cuda_nvrtc_cu12-*.dist-info"))
    )
    return _checked_nvrtc(
        place / "cuda_nvrtc" / "lib" / "libnvrtc.so.12", next(written, ""), headers
    )


def _in_toolkit(root: Path) -> Nvrtc | None:
    library = root / "lib64" / "libnvrtc.so.12"
    headers = (root / "include", root / "include" / "cccl")
    return _checked_nvrtc(
        library,
        library.resolve().name.partition(".so.")[2],
        (path for path in headers if path.is_dir()),
    )


def _checked_nvrtc(library: Path, version: str, headers: Iterator[Path]) -> Nvrtc | None:
    folders = tuple(headers)
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    full = library.is_file() and all(
        any((folder / name).is_file() for folder in folders) for name in _HEADERS
    )
    return (
        Nvrtc(ToolProgram(library, numbers), folders)
        if full and OLDEST <= numbers < (13,)
        else None
    )
