"""NVRTC of CUDA 12, which compiles for sm_70 (V100) where nvcc has dropped it: an optional extra, `pip install 'qsync-fx[volta]'`.

Of CUDA it takes a library of NVRTC and the headers; kernels that it made need CUDA's driver and nothing else.

Invariant: as of `toolchain`: what is returned serves, and a place that the user named is taken or refused.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from qsync_fx import environment
from qsync_fx.backend.cuda.tools import nvrtc_compile
from qsync_fx.backend.cuda.tools.toolchain import Program, Toolchain, cutlass, dotted, host_compiler, package_folders
from qsync_fx.errors import ToolchainError

OLDEST: Final = (12, 4)
FLAGS: Final = (*nvrtc_compile.DEVICE_FLAGS, *nvrtc_compile.HOST_FLAGS, *nvrtc_compile.LINKED)
INSTALL: Final = "pip install 'qsync-fx[volta]'"
_PACKAGES: Final = "nvidia-cuda-nvrtc-cu12, nvidia-cuda-runtime-cu12, nvidia-cuda-cccl-cu12, nvidia-cuda-nvcc-cu12"
_HEADERS: Final = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "cuda/std/cstdint")


@dataclass(frozen=True)
class Nvrtc:
    """The library with its version, and the folders of CUDA's headers."""

    library: Program
    folders: tuple[Path, ...]


def tools() -> Toolchain:
    """Returns what compiles for sm_70 without nvcc; raises `ToolchainError` where something is missing."""
    found = nvrtc()
    return Toolchain(found.library, host_compiler(None), cutlass(), found.folders)


def nvrtc() -> Nvrtc:
    """Returns NVRTC: of $QSYNC_NVRTC (a toolkit of CUDA 12, or a folder that `pip install --target` has filled), or of pip wheels."""
    if named := environment.text("QSYNC_NVRTC"):
        root = Path(os.path.abspath(Path(named).expanduser()))
        found = _in_wheels(root / "nvidia") or _in_toolkit(root)
        if found is None:
            raise ToolchainError(
                f"this folder holds no NVRTC of CUDA {dotted(OLDEST)} to 12.9 with CUDA's headers",
                where=f"QSYNC_NVRTC={named}",
                do=f"name a toolkit of CUDA 12, or a folder with {_PACKAGES}; or unset QSYNC_NVRTC and {INSTALL}",
            )
        return found
    for place in package_folders("nvidia"):
        if found := _in_wheels(place):
            return found
    raise ToolchainError(
        "nothing here compiles for sm_70 (V100), which CUDA 13 has dropped: NVRTC of CUDA 12 is missing",
        where=f"QSYNC_NVRTC, and the wheels {_PACKAGES}",
        do=f"{INSTALL}, or install CUDA 12.4 to 12.9 and set QSYNC_NVCC to its nvcc; without them, torch computes on such devices",
    )


def command(name: str, arch: str, found: Toolchain, folders: tuple[Path, ...]) -> list[str]:
    """Returns the command that compiles NAME.cu in the current folder to NAME.so, and its machine code to NAME.cubin."""
    includes = [f"-I{folder}" for folder in (*folders, *found.cutlass.folders, *found.toolkit)]
    head = [sys.executable, "-I", str(Path(nvrtc_compile.__file__).resolve())]
    return [*head, "--nvrtc", str(found.nvcc.path), "--host", str(found.host.path), "--arch", arch, *includes, name]


def _in_wheels(place: Path) -> Nvrtc | None:
    headers = (place / name / "include" for name in ("cuda_cccl", "cuda_runtime", "cuda_nvcc"))
    # The name of the file says "12" alone.
    written = (path.name.split("-")[1] for path in sorted(place.parent.glob("nvidia_cuda_nvrtc_cu12-*.dist-info")))
    return _checked(place / "cuda_nvrtc" / "lib" / "libnvrtc.so.12", next(written, ""), headers)


def _in_toolkit(root: Path) -> Nvrtc | None:
    library = root / "lib64" / "libnvrtc.so.12"
    headers = (root / "include", root / "include" / "cccl")
    return _checked(library, library.resolve().name.partition(".so.")[2], (path for path in headers if path.is_dir()))


def _checked(library: Path, version: str, headers: Iterator[Path]) -> Nvrtc | None:
    folders = tuple(headers)
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    whole = library.is_file() and all(any((folder / name).is_file() for folder in folders) for name in _HEADERS)
    return Nvrtc(Program(library, numbers), folders) if whole and OLDEST <= numbers < (13,) else None
